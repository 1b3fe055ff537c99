/* A CUDA driver and its management library for tests: HAMi-core's library loads it as it loads
 * NVIDIA's, by the names libcuda.so.1 and libnvidia-ml.so.1, which are links to this one file.
 *
 * Signatures are the ABI that is called by name; numbers are those of cuda.h and nvml.h. What the
 * GPUs hold lies in a file beside the library, driver.state, mapped and shared: each process has a
 * row with what it holds, and whoever loads the library sees all rows. As NVIDIA's does, it names a
 * process by its pid on the host, also to a caller in a PID namespace: it asks the procfs of the
 * host, at STUB_PROC (unset: /proc). The row of a process that is gone is free. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_GPU = 100, NO_CONTEXT = 201 };
enum { NVML_UNINITIALIZED = 1, NVML_INVALID = 2, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7 };
enum { GPUS = 4, ROWS = 1024, BLOCKS = 4096, MAGIC = 0xC0DA, UNIT = 2 << 20 };
enum { ATTRIBUTE_SMS = 16, ATTRIBUTE_THREADS = 39, POOL_RESERVED_HIGH = 6 };

typedef unsigned long long address_t;
typedef struct { int gpu; } gpu_t; /* what a handle or a context points to */
typedef struct {
  volatile int pid; /* on the host; 0: free */
  unsigned contexts[GPUS], percent[GPUS];
  unsigned long long held[GPUS], launches, graphs;
} row_t;

static struct state {
  int magic, count;
  pthread_mutex_t lock;
  char uuids[GPUS][96];
  unsigned long long memory[GPUS], context;
  row_t rows[ROWS];
} *all;

static gpu_t handles[GPUS];
static struct { address_t at; unsigned long long size; int gpu; } blocks[BLOCKS];
static address_t next = 0x700000000000ULL;
static unsigned long long pooled, pooled_high;
static int initialized, sessions;
static __thread gpu_t *current;

__attribute__((constructor)) static void map(void) {
  Dl_info here;
  char path[4096];
  dladdr((void *)map, &here);
  const char *slash = strrchr(here.dli_fname, '/');
  snprintf(path, sizeof path, "%.*s/driver.state", (int)(slash ? slash - here.dli_fname : 1),
           slash ? here.dli_fname : ".");
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0 || ftruncate(file, sizeof *all) != 0) abort();
  all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (all == MAP_FAILED || lockf(file, F_LOCK, 0) != 0) abort();
  for (int gpu = 0; gpu < GPUS; gpu++) handles[gpu].gpu = gpu;
  if (all->magic != MAGIC) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&all->lock, &kind);
    all->count = 2;
    all->context = 300ULL << 20;
    for (int gpu = 0; gpu < GPUS; gpu++) {
      snprintf(all->uuids[gpu], sizeof all->uuids[gpu], "GPU-c0da0000-0000-0000-0000-%012d", gpu);
      all->memory[gpu] = 16ULL << 30;
    }
    all->magic = MAGIC;
  }
  close(file); /* which also gives the lock back */
}

static const char *host_proc(void) {
  const char *named = getenv("STUB_PROC");
  return named ? named : "/proc";
}

static int host_pid(void) {
  char path[4200], text[32] = {0};
  snprintf(path, sizeof path, "%s/self", host_proc());
  return readlink(path, text, sizeof text - 1) > 0 ? atoi(text) : 0;
}

static int alive(int pid) {
  char path[4200];
  snprintf(path, sizeof path, "%s/%d", host_proc(), pid);
  return access(path, F_OK) == 0;
}

static void hold(void) {
  if (pthread_mutex_lock(&all->lock) != 0) pthread_mutex_consistent(&all->lock);
}
static void let_go(void) { pthread_mutex_unlock(&all->lock); }

/* Under the lock: the rows of those who are gone are given back. */
static void sweep(void) {
  for (int at = 0; at < ROWS; at++)
    if (all->rows[at].pid && !alive(all->rows[at].pid)) memset(&all->rows[at], 0, sizeof(row_t));
}

/* Under the lock: the row of `pid`, made where there is none and `make` says so. */
static row_t *row_of(int pid, int make) {
  for (int at = 0; at < ROWS; at++)
    if (all->rows[at].pid == pid) return &all->rows[at];
  for (int at = 0; make && at < ROWS; at++)
    if (!all->rows[at].pid) {
      all->rows[at].pid = pid;
      return &all->rows[at];
    }
  return NULL;
}

static unsigned long long used(const row_t *row, int gpu) {
  return row->held[gpu] + (row->contexts[gpu] ? all->context : 0);
}

static unsigned long long taken(int gpu) {
  unsigned long long sum = 0;
  for (int at = 0; at < ROWS; at++)
    if (all->rows[at].pid) sum += used(&all->rows[at], gpu);
  return sum;
}

/* The test's side. */

int stub_busy(int pid, int gpu, unsigned percent) { /* what the GPU did for a process lately */
  hold();
  row_t *row = row_of(pid, 0);
  if (row) row->percent[gpu] = percent;
  let_go();
  return row ? OK : INVALID;
}
unsigned long long stub_launches(int pid) {
  hold();
  row_t *row = row_of(pid, 0);
  unsigned long long count = row ? row->launches : 0;
  let_go();
  return count;
}
unsigned long long stub_used(int gpu) {
  hold();
  sweep();
  unsigned long long sum = taken(gpu);
  let_go();
  return sum;
}
unsigned long long stub_context(void) { return all->context; }
void stub_count(int count) { all->count = count; }

/* The driver. */

int cuInit(unsigned flags) {
  if (flags) return INVALID;
  if (!all->count) return NO_GPU;
  initialized = 1;
  return OK;
}
int cuDriverGetVersion(int *version) { *version = 12080; return OK; }
int cuDeviceGetCount(int *count) { *count = all->count; return initialized ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int *gpu, int index) { *gpu = index; return index < all->count ? OK : INVALID; }
int cuDeviceGetName(char *name, int size, int gpu) { (void)gpu; snprintf(name, size, "Stub GPU"); return OK; }
int cuDeviceGetAttribute(int *value, int attribute, int gpu) {
  (void)gpu;
  *value = attribute == ATTRIBUTE_SMS ? 108 : attribute == ATTRIBUTE_THREADS ? 2048 : 0;
  return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int gpu) { *bytes = all->memory[gpu]; return OK; }
int cuDevicePrimaryCtxRetain(gpu_t **context, int gpu) {
  if (gpu < 0 || gpu >= all->count) return INVALID;
  hold();
  sweep();
  row_t *row = row_of(host_pid(), 1);
  int fits = row && (row->contexts[gpu] || taken(gpu) + all->context <= all->memory[gpu]);
  if (fits) row->contexts[gpu]++;
  let_go();
  *context = &handles[gpu];
  return fits ? OK : OUT_OF_MEMORY;
}
int cuDevicePrimaryCtxRelease_v2(int gpu) { /* the last release takes the memory along */
  hold();
  row_t *row = row_of(host_pid(), 0);
  int held = row && row->contexts[gpu];
  if (held && --row->contexts[gpu] == 0) row->held[gpu] = 0;
  let_go();
  return held ? OK : NO_CONTEXT;
}
int cuDevicePrimaryCtxRelease(int gpu) { return cuDevicePrimaryCtxRelease_v2(gpu); }
int cuCtxSetCurrent(gpu_t *context) { current = context; return OK; }
int cuCtxGetCurrent(gpu_t **context) { *context = current; return OK; }
int cuCtxGetDevice(int *gpu) {
  if (!current) return NO_CONTEXT;
  *gpu = current->gpu;
  return OK;
}
int cuCtxSynchronize(void) { return current ? OK : NO_CONTEXT; }

static int allocate(address_t *at, unsigned long long size, int gpu) {
  if (!size) return INVALID;
  hold();
  sweep();
  row_t *row = row_of(host_pid(), 1);
  int fits = row && taken(gpu) + size <= all->memory[gpu], block = 0;
  while (block < BLOCKS && blocks[block].size) block++;
  fits = fits && block < BLOCKS;
  if (fits) {
    row->held[gpu] += size;
    *at = blocks[block].at = next;
    blocks[block].size = size;
    blocks[block].gpu = gpu;
    next += (size + UNIT - 1) / UNIT * UNIT;
  }
  let_go();
  return fits ? OK : OUT_OF_MEMORY;
}
static int release(address_t at, unsigned long long *size) {
  int code = INVALID;
  hold();
  row_t *row = row_of(host_pid(), 0);
  for (int block = 0; row && block < BLOCKS; block++)
    if (blocks[block].size && blocks[block].at == at) {
      row->held[blocks[block].gpu] -= blocks[block].size;
      if (size) *size = blocks[block].size;
      blocks[block].size = 0;
      code = OK;
    }
  let_go();
  return code;
}

int cuMemAlloc_v2(address_t *at, size_t size) { return current ? allocate(at, size, current->gpu) : NO_CONTEXT; }
int cuMemAllocManaged(address_t *at, size_t size, unsigned flags) { (void)flags; return cuMemAlloc_v2(at, size); }
int cuMemAllocPitch_v2(address_t *at, size_t *pitch, size_t width, size_t height, unsigned element) {
  (void)element;
  *pitch = (width + 511) / 512 * 512;
  return cuMemAlloc_v2(at, *pitch * height);
}
int cuMemFree_v2(address_t at) { return release(at, NULL); }
int cuMemCreate(address_t *handle, size_t size, const int *properties, unsigned long long flags) {
  (void)flags; /* type of allocation, of handle, of place; the place: a GPU */
  return properties[2] == 1 ? allocate(handle, size, properties[3]) : INVALID;
}
int cuMemRelease(address_t handle) { return release(handle, NULL); }
int cuMemAllocAsync(address_t *at, size_t size, void *stream) {
  (void)stream;
  int code = cuMemAlloc_v2(at, size);
  if (code == OK) pooled += (size + UNIT - 1) / UNIT * UNIT;
  if (pooled > pooled_high) pooled_high = pooled;
  return code;
}
int cuMemFreeAsync(address_t at, void *stream) {
  (void)stream;
  unsigned long long size = 0;
  int code = release(at, &size);
  pooled -= (size + UNIT - 1) / UNIT * UNIT;
  return code;
}
int cuDeviceGetMemPool(void **pool, int gpu) { *pool = &handles[gpu]; return OK; }
int cuMemPoolGetAttribute(void *pool, int attribute, void *value) {
  (void)pool;
  *(uint64_t *)value = attribute == POOL_RESERVED_HIGH ? pooled_high : 0;
  return OK;
}
int cuMemAllocHost_v2(void **at, size_t size) { return (*at = malloc(size)) ? OK : OUT_OF_MEMORY; }
int cuMemFreeHost(void *at) { free(at); return OK; }
int cuMemGetInfo_v2(size_t *left, size_t *total) {
  if (!current) return NO_CONTEXT;
  *total = all->memory[current->gpu];
  *left = *total - stub_used(current->gpu);
  return OK;
}
static int launch(int graph) {
  if (!current) return NO_CONTEXT;
  hold();
  row_t *row = row_of(host_pid(), 1);
  if (row) (*(graph ? &row->graphs : &row->launches))++;
  let_go();
  return row ? OK : OUT_OF_MEMORY;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
  (void)function, (void)shared, (void)stream, (void)arguments, (void)extra;
  return gx && gy && gz && bx && by && bz ? launch(0) : INVALID;
}
int cuGraphLaunch(void *graph, void *stream) { (void)graph, (void)stream; return launch(1); }
int cuArray3DGetDescriptor_v2(void *descriptor, void *array) { (void)descriptor, (void)array; return INVALID; }
int cuGetExportTable(const void **table, const void *id) { (void)table, (void)id; return INVALID; }

/* The management library. */

typedef struct { unsigned pid; unsigned long long memory; } process_v1_t;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process_t;
typedef struct { unsigned pid; unsigned long long stamp; unsigned sm, memory, encoder, decoder; } sample_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned gpu, memory; } rates_t;

#define SESSION() do { if (sessions <= 0) return NVML_UNINITIALIZED; } while (0)

int nvmlInit_v2(void) { __sync_fetch_and_add(&sessions, 1); return OK; }
int nvmlInit(void) { return nvmlInit_v2(); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { SESSION(); __sync_fetch_and_sub(&sessions, 1); return OK; }
const char *nvmlErrorString(int code) { (void)code; return "stub error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { SESSION(); snprintf(text, size, "999.2"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { SESSION(); *count = all->count; return OK; }
int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu) {
  SESSION();
  if (index >= (unsigned)all->count) return NVML_INVALID;
  *gpu = &handles[index];
  return OK;
}
int nvmlDeviceGetHandleByIndex(unsigned index, gpu_t **gpu) { return nvmlDeviceGetHandleByIndex_v2(index, gpu); }
int nvmlDeviceGetHandleByUUID(const char *uuid, gpu_t **gpu) {
  SESSION();
  for (int index = 0; index < all->count; index++)
    if (strcmp(all->uuids[index], uuid) == 0) return nvmlDeviceGetHandleByIndex_v2(index, gpu);
  return NVML_NOT_FOUND;
}
int nvmlDeviceGetIndex(gpu_t *gpu, unsigned *index) { SESSION(); *index = gpu->gpu; return OK; }
int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned size) {
  SESSION();
  snprintf(text, size, "%s", all->uuids[gpu->gpu]);
  return OK;
}
int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned size) { SESSION(); (void)gpu; snprintf(text, size, "NVIDIA Stub"); return OK; }
int nvmlDeviceGetMemoryInfo(gpu_t *gpu, memory_t *memory) {
  SESSION();
  unsigned long long held = stub_used(gpu->gpu), total = all->memory[gpu->gpu];
  *memory = (memory_t){total, total - held, held};
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory_v2_t *memory) {
  memory_t plain;
  int code = nvmlDeviceGetMemoryInfo(gpu, &plain);
  if (code == OK) *memory = (memory_v2_t){memory->version, plain.total, 0, plain.free, plain.used};
  return code;
}
int nvmlDeviceGetUtilizationRates(gpu_t *gpu, rates_t *rates) {
  SESSION();
  *rates = (rates_t){0, 0};
  hold();
  sweep();
  for (int at = 0; at < ROWS; at++)
    if (all->rows[at].pid) rates->gpu += all->rows[at].percent[gpu->gpu];
  let_go();
  if (rates->gpu > 100) rates->gpu = 100;
  return OK;
}

/* The processes with a context on the GPU; `count` is the room, and becomes how many there are. */
static int processes(gpu_t *gpu, unsigned *count, void *out, size_t size) {
  SESSION();
  unsigned there = 0, room = *count;
  hold();
  sweep();
  for (int at = 0; at < ROWS; at++) {
    row_t *row = &all->rows[at];
    if (!row->pid || !row->contexts[gpu->gpu]) continue;
    if (out && there < room) {
      process_v1_t *one = (process_v1_t *)((char *)out + there * size);
      memset(one, 0, size);
      one->pid = row->pid;
      one->memory = used(row, gpu->gpu);
    }
    there++;
  }
  let_go();
  *count = there;
  return there > room ? NVML_TOO_SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses(gpu_t *gpu, unsigned *count, void *out) {
  return processes(gpu, count, out, sizeof(process_v1_t));
}
int nvmlDeviceGetComputeRunningProcesses_v2(gpu_t *gpu, unsigned *count, void *out) {
  return processes(gpu, count, out, sizeof(process_t));
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, void *out) {
  return processes(gpu, count, out, sizeof(process_t));
}
int nvmlDeviceGetProcessUtilization(gpu_t *gpu, sample_t *out, unsigned *count, unsigned long long since) {
  SESSION();
  (void)since;
  unsigned there = 0, room = *count;
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  hold();
  sweep();
  for (int at = 0; at < ROWS; at++) {
    row_t *row = &all->rows[at];
    if (!row->pid || !row->percent[gpu->gpu]) continue;
    if (out && there < room)
      out[there] = (sample_t){row->pid, now.tv_sec * 1000000ULL + now.tv_nsec / 1000,
                              row->percent[gpu->gpu], 0, 0, 0};
    there++;
  }
  let_go();
  *count = there;
  return !there ? NVML_NOT_FOUND : there > room ? NVML_TOO_SMALL : OK;
}
