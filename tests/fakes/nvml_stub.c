/* A management library with three GPUs, for tests: the real pynvml loads it as it loads NVIDIA's.
 * Signatures are the ABI that pynvml calls by name; numbers are nvml.h's. The stub_ functions are
 * the test's. Not offered at all: NVLinks and remapped rows, as in an old driver. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMED_OUT = 10, LOST = 15 };
enum { GPUS = 3, QUEUE = 64 };

typedef struct { int index; } gpu_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct {
  char legacy[16];
  unsigned int domain, bus, device, id, subsystem;
  char bus_id[32];
} pci_t;
typedef struct {
  gpu_t *gpu;
  unsigned long long type, data;
  unsigned int gpu_instance, compute_instance;
} event_t;

static gpu_t gpus[GPUS] = {{0}, {1}, {2}};
static volatile int lost[GPUS], hanging[GPUS], sessions, sets;
static volatile unsigned head, tail;
static event_t queue[QUEUE];

static int enter(gpu_t *gpu) {
  if (!sessions) return UNINITIALIZED;
  while (hanging[gpu->index]) usleep(1000);
  return lost[gpu->index] ? LOST : OK;
}

void stub_lose(int index, int value) { lost[index] = value; }
void stub_hang(int index, int value) { hanging[index] = value; }
int stub_sessions(void) { return sessions; }
int stub_sets(void) { return sets; }
void stub_xid(int index, unsigned long long xid) {
  queue[tail % QUEUE] = (event_t){&gpus[index], 0x8, xid, 0xffffffff, 0xffffffff};
  tail++;
}

int nvmlInitWithFlags(unsigned int flags) { (void)flags; sessions++; return OK; }
int nvmlShutdown(void) { sessions--; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) { snprintf(text, size, "999.1"); return OK; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = GPUS; return sessions ? OK : UNINITIALIZED; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, gpu_t **gpu) {
  if (index >= GPUS) return INVALID;
  *gpu = &gpus[index];
  return enter(*gpu);
}
int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned int size) {
  int code = enter(gpu);
  if (code == OK) snprintf(text, size, "GPU-5708-%d", gpu->index);
  return code;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) {
  for (int i = 0; i < GPUS; i++) {
    char text[32];
    snprintf(text, sizeof text, "GPU-5708-%d", i);
    if (strcmp(text, uuid) == 0) { *gpu = &gpus[i]; return enter(*gpu); }
  }
  return NOT_FOUND;
}
int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned int size) { snprintf(text, size, "Stub GPU"); return enter(gpu); }
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory) {
  int code = enter(gpu);
  if (code == OK && gpu->index == 2) return NOT_SUPPORTED;
  memory->total = 16ULL << 30;
  return code;
}
int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci) {
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", 0xAF + gpu->index);
  return enter(gpu);
}
int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned int *minor) { *minor = gpu->index; return enter(gpu); }
int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned int *now, unsigned int *next) {
  int code = enter(gpu);
  (void)now; (void)next;
  return code == OK ? NOT_SUPPORTED : code;
}
int nvmlDeviceGetTopologyCommonAncestor(gpu_t *one, gpu_t *other, int *level) {
  (void)other;
  *level = 40;
  return enter(one);
}
int nvmlEventSetCreate(void **set) { *set = &queue; sets++; return OK; }
int nvmlEventSetFree(void *set) { (void)set; sets--; return OK; }
int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, unsigned long long *types) { *types = 0x1f; return enter(gpu); }
int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, void *set) {
  (void)set;
  return types == 0xb ? enter(gpu) : INVALID;
}
int nvmlEventSetWait_v2(void *set, event_t *event, unsigned int milliseconds) {
  (void)set;
  for (unsigned int i = 0; i < milliseconds; i++) {
    if (head != tail) { *event = queue[head++ % QUEUE]; return OK; }
    usleep(1000);
  }
  return TIMED_OUT;
}
