/* A management library for tests: the real pynvml loads it as it loads NVIDIA's.
 *
 * Signatures are the ABI that pynvml calls by name; numbers are nvml.h's. All state lies in a file
 * beside the library, <library>.state, mapped and shared: whoever loads the same file in another
 * process sees, and with the stub_ functions changes, the same GPUs. Built with -DOLD_DRIVER it
 * lacks what drivers before 450 lack. A GPU is named by its slot, which never changes; its index is
 * its place in the order. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
  OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7,
  TIMED_OUT = 10, LOST = 15, RESET_REQUIRED = 16
};
#define BUS_ID "%08X:%02X:00.0"
enum { GPUS = 16, QUEUE = 16384, STEP_US = 1000, MAGIC = 0x5708 };

#define CALLS(X) \
  X(any) X(nvmlInitWithFlags) X(nvmlShutdown) X(nvmlSystemGetDriverVersion) \
  X(nvmlDeviceGetCount_v2) X(nvmlDeviceGetHandleByIndex_v2) \
  X(nvmlDeviceGetHandleByUUID) X(nvmlDeviceGetHandleByPciBusId_v2) X(nvmlDeviceGetIndex) X(nvmlDeviceGetUUID) X(nvmlDeviceGetName) X(nvmlDeviceGetMemoryInfo) X(nvmlDeviceGetMemoryInfo_v2) \
  X(nvmlDeviceGetPciInfo_v3) X(nvmlDeviceGetMinorNumber) X(nvmlDeviceGetMigMode) \
  X(nvmlDeviceGetTopologyCommonAncestor) X(nvmlDeviceGetNvLinkState) \
  X(nvmlDeviceGetNvLinkRemotePciInfo_v2) X(nvmlDeviceGetNvLinkRemoteDeviceType) \
  X(nvmlDeviceGetRemappedRows) X(nvmlDeviceGetRetiredPagesPendingStatus) \
  X(nvmlDeviceGetGpuFabricInfo) X(nvmlDeviceGetTotalEccErrors) X(nvmlDeviceGetFieldValues) \
  X(nvmlDeviceGetUtilizationRates) X(nvmlDeviceGetTemperature) X(nvmlDeviceGetPowerUsage) \
  X(nvmlDeviceGetSupportedEventTypes) \
  X(nvmlDeviceRegisterEvents) X(nvmlEventSetCreate) X(nvmlEventSetWait_v2) X(nvmlEventSetFree)
#define NUMBER(name) C_##name,
#define NAME(name) #name,
enum call { CALLS(NUMBER) MOST_CALLS };
static const char *const names[] = {CALLS(NAME)};

/* Numbers of a GPU that a test may set, by name. */
#define FIELDS(X) \
  X(memory) X(used) X(reserved) X(minor) X(mig) X(level) X(nvlinks) X(bridged) \
  X(rows_corrected) X(rows_uncorrected) X(rows_pending) X(rows_failed) X(pages_pending) \
  X(ecc_corrected) X(ecc_uncorrected) X(recovery) X(gpu_percent) \
  X(ecc_life_corrected) X(ecc_life_uncorrected) X(celsius) X(milliwatts) X(memory_percent) X(event_types) X(domain) X(fabric) X(fabric_status)
#define FIELD(name) F_##name,
enum field { FIELDS(FIELD) MOST_FIELDS };
static const char *const fields[] = {FIELDS(NAME)};

typedef struct { int slot; } gpu_t; /* what a handle points to */
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;
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
typedef struct { unsigned int gpu, memory; } rates_t;
typedef struct {
  unsigned char cluster[16];
  unsigned int status, clique;
  unsigned char state;
} fabric_t;
typedef struct {
  unsigned int field, scope;
  long long stamp, latency;
  unsigned int type;
  int code;
  union { double d; unsigned int u; unsigned long long ull; } value;
} value_t;
typedef struct { unsigned long long masks[GPUS]; unsigned resets[GPUS], cursor; } set_t;

typedef struct {
  char uuid[80], name[96];
  long long fields[MOST_FIELDS];
  volatile int failing[MOST_CALLS], hanging[MOST_CALLS];
  volatile unsigned resets; /* each of them ends what the GPU was registered for before */
  volatile int attached;    /* a session holds it: it can neither be reset nor be repartitioned */
} slot_t;

static struct state {
  int magic;
  volatile int sessions, sets, inside, waiting, ending, undefined, spoiled;
  char driver[80], library[80];
  volatile int failing[MOST_CALLS], hanging[MOST_CALLS];
  volatile unsigned calls[MOST_CALLS];
  int count, order[GPUS];
  slot_t slots[GPUS];
  volatile int bell; /* another number whenever a wait for events may have to end */
  volatile unsigned head;
  struct { int slot; unsigned long long type, data; } events[QUEUE];
} *all;

static gpu_t handles[GPUS];

static void describe(int slot) {
  slot_t *gpu = &all->slots[slot];
  memset(gpu, 0, sizeof *gpu);
  snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-5708-%d", slot);
  snprintf(gpu->name, sizeof gpu->name, "Stub GPU");
  gpu->fields[F_memory] = 16LL << 30;
  gpu->fields[F_minor] = slot;
  gpu->fields[F_level] = 40;
  gpu->fields[F_event_types] = 0x19f;
  gpu->fields[F_celsius] = -1;
}

__attribute__((constructor)) static void map(void) {
  Dl_info here;
  char path[4096];
  dladdr((void *)map, &here);
  snprintf(path, sizeof path, "%s.state", here.dli_fname);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof *all) != 0) abort();
  all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (all == MAP_FAILED) abort();
  close(file);
  for (int slot = 0; slot < GPUS; slot++)
    handles[slot] = (gpu_t){slot};
  if (all->magic == MAGIC) return;
  snprintf(all->driver, sizeof all->driver, "999.1");
  snprintf(all->library, sizeof all->library, "12.999.1");
  for (int slot = 0; slot < GPUS; slot++) describe(slot);
  all->count = 3;
  for (int index = 0; index < GPUS; index++) all->order[index] = index;
  all->slots[2].fields[F_memory] = -1; /* a part with coherent memory does not tell */
  all->magic = MAGIC;
}

/* Who waits for an event rests as NVIDIA's library does: it wakes for nothing but news. */
static void ring(void) {
  __sync_fetch_and_add(&all->bell, 1);
  syscall(SYS_futex, &all->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
static void rest(int heard, long long milliseconds) {
  struct timespec most = {milliseconds / 1000, milliseconds % 1000 * 1000000};
  syscall(SYS_futex, &all->bell, FUTEX_WAIT, heard, &most, NULL, 0);
}

/* The test's side. */

const char *stub_call(int number) { return number < MOST_CALLS ? names[number] : NULL; }
const char *stub_field(int number) { return number < MOST_FIELDS ? fields[number] : NULL; }
int stub_sessions(void) { return all->sessions; }
int stub_sets(void) { return all->sets; }
int stub_inside(void) { return all->inside; }
int stub_undefined(void) { return all->undefined; }
int stub_attached(int slot) { return all->slots[slot].attached; }
void stub_spoil(int code) { all->spoiled = code; }
unsigned stub_calls(int call) { return all->calls[call]; }
void stub_fail(int call, int slot, int code) {
  volatile int *place = &(slot < 0 ? all->failing : all->slots[slot].failing)[call];
  if (slot >= 0 && call == C_any && !code && (*place == LOST || *place == RESET_REQUIRED))
    all->slots[slot].resets++;
  *place = code;
  ring();
}
void stub_hang(int call, int slot, int value) {
  (slot < 0 ? all->hanging : all->slots[slot].hanging)[call] = value;
  ring();
}
void stub_set(int slot, int field, long long value) { all->slots[slot].fields[field] = value; }
void stub_end(void) { all->sessions = 0; ring(); }
void stub_name(int slot, const char *name) { snprintf(all->slots[slot].name, sizeof all->slots[slot].name, "%s", name); }
void stub_version(const char *driver) { snprintf(all->driver, sizeof all->driver, "%s", driver); }
void stub_order(int count, const int *slots) {
  for (int index = 0; index < count; index++) all->order[index] = slots[index];
  all->count = count;
}
void stub_event(int slot, unsigned long long type, unsigned long long data) {
  unsigned at = all->head % QUEUE;
  all->events[at].slot = slot;
  all->events[at].type = type;
  all->events[at].data = data;
  __sync_fetch_and_add(&all->head, 1);
  ring();
}

/* The driver's side. */

static int present(int slot) {
  for (int index = 0; index < all->count; index++)
    if (all->order[index] == slot) return 1;
  return 0;
}

static int hung(enum call call, const slot_t *gpu) {
  if (all->hanging[call] || all->hanging[C_any]) return 1;
  return gpu && (gpu->hanging[call] || gpu->hanging[C_any]);
}

static int enter(enum call call, const gpu_t *handle) {
  const slot_t *gpu = handle ? &all->slots[handle->slot] : NULL;
  __sync_fetch_and_add(&all->calls[call], 1);
  if (all->ending && call != C_nvmlShutdown) __sync_fetch_and_add(&all->undefined, 1);
  __sync_fetch_and_add(&all->inside, 1);
  while (hung(call, gpu)) usleep(STEP_US);
  __sync_fetch_and_sub(&all->inside, 1);
  if (all->failing[C_any]) return all->failing[C_any];
  if (all->failing[call]) return all->failing[call];
  if (call != C_nvmlInitWithFlags && all->sessions <= 0) return UNINITIALIZED;
  if (!gpu) return OK;
  if (all->spoiled) return all->spoiled;
  if (!present(handle->slot)) return LOST;
  return gpu->failing[C_any] ? gpu->failing[C_any] : gpu->failing[call];
}
#define ENTER(call, handle) do { int code_ = enter(C_##call, handle); if (code_ != OK) return code_; } while (0)
#define TELL(call, handle, out, field) \
  do { ENTER(call, handle); long long value_ = get(handle, F_##field); \
    if (value_ >= 0) *(out) = value_; \
    return value_ < 0 ? NOT_SUPPORTED : OK; } while (0)

static void attach(const gpu_t *handle) { all->slots[handle->slot].attached = 1; }

static long long get(const gpu_t *handle, enum field field) { return all->slots[handle->slot].fields[field]; }

int nvmlInitWithFlags(unsigned int flags) {
  (void)flags;
  ENTER(nvmlInitWithFlags, NULL);
  if (!all->sessions) all->spoiled = 0;
  __sync_fetch_and_add(&all->sessions, 1);
  return OK;
}
int nvmlShutdown(void) { /* nobody may be inside, nor come in */
  __sync_fetch_and_add(&all->ending, 1);
  if (all->inside || all->waiting) __sync_fetch_and_add(&all->undefined, 1);
  int code = enter(C_nvmlShutdown, NULL);
  if (code == OK && __sync_sub_and_fetch(&all->sessions, 1) == 0)
    for (int slot = 0; slot < GPUS; slot++) all->slots[slot].attached = 0;
  ring();
  __sync_fetch_and_sub(&all->ending, 1);
  return code;
}
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned int size) {
  ENTER(nvmlSystemGetDriverVersion, NULL);
  snprintf(text, size, "%s", all->driver);
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned int *count) { ENTER(nvmlDeviceGetCount_v2, NULL); *count = all->count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, gpu_t **gpu) {
  if ((int)index >= all->count) return INVALID;
  *gpu = &handles[all->order[index]];
  ENTER(nvmlDeviceGetHandleByIndex_v2, *gpu);
  attach(*gpu);
  return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) { /* looks at others on its way */
  for (int index = 0; index < all->count; index++) {
    int slot = all->order[index];
    if (strcmp(all->slots[slot].uuid, uuid) != 0) {
      all->slots[slot].attached = 1;
      continue;
    }
    *gpu = &handles[slot];
    ENTER(nvmlDeviceGetHandleByUUID, *gpu);
    attach(*gpu);
    return OK;
  }
  ENTER(nvmlDeviceGetHandleByUUID, NULL);
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, gpu_t **gpu) {
  for (int index = 0; index < all->count; index++) {
    int slot = all->order[index];
    char own[32];
    snprintf(own, sizeof own, BUS_ID, (unsigned)all->slots[slot].fields[F_domain], 0xAF + slot);
    if (strcasecmp(own, bus_id) != 0) continue;
    *gpu = &handles[slot];
    ENTER(nvmlDeviceGetHandleByPciBusId_v2, *gpu);
    attach(*gpu);
    return OK;
  }
  ENTER(nvmlDeviceGetHandleByPciBusId_v2, NULL);
  return NOT_FOUND;
}
int nvmlDeviceGetIndex(gpu_t *gpu, unsigned int *index) {
  ENTER(nvmlDeviceGetIndex, gpu);
  for (*index = 0; all->order[*index] != gpu->slot;) ++*index;
  return OK;
}
int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned int size) {
  ENTER(nvmlDeviceGetUUID, gpu);
  snprintf(text, size, "%s", all->slots[gpu->slot].uuid);
  return OK;
}
int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned int size) {
  ENTER(nvmlDeviceGetName, gpu);
  snprintf(text, size, "%s", all->slots[gpu->slot].name);
  return OK;
}
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory) {
  ENTER(nvmlDeviceGetMemoryInfo, gpu);
  long long total = get(gpu, F_memory);
  if (total < 0) return NOT_SUPPORTED;
  memory->total = total;
  memory->used = get(gpu, F_used) + get(gpu, F_reserved);
  memory->free = memory->total - memory->used;
  return OK;
}
#ifndef OLD_DRIVER
int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory_v2_t *memory) {
  ENTER(nvmlDeviceGetMemoryInfo_v2, gpu);
  long long total = get(gpu, F_memory);
  if (total < 0) return NOT_SUPPORTED;
  memory->total = total;
  memory->reserved = get(gpu, F_reserved);
  memory->used = get(gpu, F_used);
  memory->free = total - memory->used - memory->reserved;
  return OK;
}
#endif
int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *pci) {
  ENTER(nvmlDeviceGetPciInfo_v3, gpu);
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, BUS_ID, (unsigned)get(gpu, F_domain), 0xAF + gpu->slot);
  return OK;
}
int nvmlDeviceGetMinorNumber(gpu_t *gpu, unsigned int *minor) { TELL(nvmlDeviceGetMinorNumber, gpu, minor, minor); }
int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned int *now, unsigned int *next) {
  ENTER(nvmlDeviceGetMigMode, gpu);
  if (get(gpu, F_mig) < 0) return NOT_SUPPORTED;
  *now = *next = get(gpu, F_mig);
  return OK;
}
int nvmlDeviceGetTopologyCommonAncestor(gpu_t *one, gpu_t *other, int *level) {
  ENTER(nvmlDeviceGetTopologyCommonAncestor, other);
  TELL(nvmlDeviceGetTopologyCommonAncestor, one, level, level);
}
int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, int type, int counter, unsigned long long *count) {
  ENTER(nvmlDeviceGetTotalEccErrors, gpu);
  int since_load = type ? F_ecc_uncorrected : F_ecc_corrected;
  int in_life = type ? F_ecc_life_uncorrected : F_ecc_life_corrected;
  long long value = get(gpu, counter ? in_life : since_load);
  *count = value;
  return value < 0 ? NOT_SUPPORTED : OK;
}
int nvmlDeviceGetTemperature(gpu_t *gpu, int sensor, unsigned int *celsius) {
  if (sensor) return INVALID;
  TELL(nvmlDeviceGetTemperature, gpu, celsius, celsius);
}
int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned int *milliwatts) {
  TELL(nvmlDeviceGetPowerUsage, gpu, milliwatts, milliwatts);
}
int nvmlDeviceGetRetiredPagesPendingStatus(gpu_t *gpu, int *pending) {
  TELL(nvmlDeviceGetRetiredPagesPendingStatus, gpu, pending, pages_pending);
}
int nvmlDeviceGetUtilizationRates(gpu_t *gpu, rates_t *rates) {
  ENTER(nvmlDeviceGetUtilizationRates, gpu);
  if (get(gpu, F_gpu_percent) < 0) return NOT_SUPPORTED;
  *rates = (rates_t){get(gpu, F_gpu_percent), get(gpu, F_memory_percent)};
  return OK;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetNvLinkState(gpu_t *gpu, unsigned int link, unsigned int *active) {
  ENTER(nvmlDeviceGetNvLinkState, gpu);
  if (get(gpu, F_nvlinks) <= 0) return NOT_SUPPORTED;
  *active = link < get(gpu, F_nvlinks);
  return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu_t *gpu, unsigned int link, pci_t *pci) {
  ENTER(nvmlDeviceGetNvLinkRemotePciInfo_v2, gpu);
  memset(pci, 0, sizeof *pci);
  snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:FF:%02X.0", link);
  int peer = get(gpu, F_bridged) - 1; /* the slot at the other end; none: a switch */
  if (peer >= 0) snprintf(pci->bus_id, sizeof pci->bus_id, BUS_ID, (unsigned)all->slots[peer].fields[F_domain], 0xAF + peer);
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu_t *gpu, unsigned int link, unsigned int *kind) {
  (void)link;
  ENTER(nvmlDeviceGetNvLinkRemoteDeviceType, gpu);
  *kind = get(gpu, F_bridged) ? 0 : 2; /* a GPU, or a switch */
  return OK;
}
int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
  ENTER(nvmlDeviceGetRemappedRows, gpu);
  if (get(gpu, F_rows_corrected) < 0) return NOT_SUPPORTED;
  *corrected = get(gpu, F_rows_corrected);
  *uncorrected = get(gpu, F_rows_uncorrected);
  *pending = get(gpu, F_rows_pending);
  *failed = get(gpu, F_rows_failed);
  return OK;
}
int nvmlDeviceGetGpuFabricInfo(gpu_t *gpu, fabric_t *info) {
  ENTER(nvmlDeviceGetGpuFabricInfo, gpu);
  memset(info, 0, sizeof *info);
  info->state = get(gpu, F_fabric);
  info->status = get(gpu, F_fabric_status);
  return OK;
}
int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, value_t *values) {
  ENTER(nvmlDeviceGetFieldValues, gpu);
  for (int one = 0; one < count; one++) {
    int known = values[one].field == 230 && get(gpu, F_recovery) >= 0;
    values[one].code = known ? OK : NOT_SUPPORTED;
    values[one].type = 1;
    values[one].value.u = known ? get(gpu, F_recovery) : 0;
  }
  return OK;
}
#endif

int nvmlEventSetCreate(set_t **set) {
  ENTER(nvmlEventSetCreate, NULL);
  *set = calloc(1, sizeof **set);
  (*set)->cursor = all->head;
  __sync_fetch_and_add(&all->sets, 1);
  return OK;
}
int nvmlEventSetFree(set_t *set) {
  int code = enter(C_nvmlEventSetFree, NULL);
  free(set); /* whatever is the matter with the driver: a set that is left counts as a leak */
  __sync_fetch_and_sub(&all->sets, 1);
  return code;
}
int nvmlDeviceGetSupportedEventTypes(gpu_t *gpu, unsigned long long *types) {
  TELL(nvmlDeviceGetSupportedEventTypes, gpu, types, event_types);
}
int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, set_t *set) {
  ENTER(nvmlDeviceRegisterEvents, gpu);
  if (!types) return INVALID;
  if (types & ~(unsigned long long)get(gpu, F_event_types)) return NOT_SUPPORTED;
  if (set->resets[gpu->slot] != all->slots[gpu->slot].resets) set->masks[gpu->slot] = 0;
  set->resets[gpu->slot] = all->slots[gpu->slot].resets;
  set->masks[gpu->slot] |= types;
  ring();
  return OK;
}
static long long now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}
/* One GPU of a set that is lost makes the wait fail for all of them. */
static int has_lost(const set_t *set) {
  for (int slot = 0; slot < GPUS; slot++) {
    const slot_t *gpu = &all->slots[slot];
    int registered = set->masks[slot] && set->resets[slot] == gpu->resets;
    if (registered && gpu->failing[C_any] == LOST) return 1;
  }
  return 0;
}
static int await_event(set_t *set, event_t *event, unsigned int milliseconds) {
  ENTER(nvmlEventSetWait_v2, NULL);
  for (long long end = now_ms() + milliseconds;;) {
    int heard = all->bell;
    if (all->head - set->cursor > QUEUE) set->cursor = all->head - QUEUE;
    while (set->cursor != all->head) {
      unsigned at = set->cursor++ % QUEUE;
      int slot = all->events[at].slot;
      if (!(set->masks[slot] & all->events[at].type)) continue;
      if (set->resets[slot] != all->slots[slot].resets) continue;
      *event = (event_t){&handles[slot], all->events[at].type, all->events[at].data, ~0u, ~0u};
      return OK;
    }
    ENTER(nvmlEventSetWait_v2, NULL);
    if (has_lost(set)) return LOST;
    long long left = end - now_ms();
    if (left <= 0) return TIMED_OUT;
    rest(heard, left);
  }
}
int nvmlEventSetWait_v2(set_t *set, event_t *event, unsigned int milliseconds) {
  __sync_fetch_and_add(&all->waiting, 1);
  int code = await_event(set, event, milliseconds);
  __sync_fetch_and_sub(&all->waiting, 1);
  return code;
}
