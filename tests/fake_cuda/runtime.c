/* A CUDA runtime and driver without a device: kernels do nothing, memory is host memory.
 *
 * Preloaded before the real libraries, it lets the CUDA build of torch believe in one GPU. What is
 * real: allocations (as address space), copies, memset, the books of streams, events and captures.
 * What is not: any value that a kernel would compute, and any time that it would take.
 *
 * Environment: FAKE_CUDA_MEMORY (bytes, default those of an H200), FAKE_CUDA_CAPABILITY (90),
 * FAKE_CUDA_STOP_AT_STRAY (1: abort at the first kernel that is launched beside a capture).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "counts.h"

#define ok cudaSuccess
#define FAKE_CUDA_NAME "fake CUDA device (no GPU, kernels do nothing)"
#define CUDA_VERSION_TOLD 13020
#define PAGE 4096ul

struct fake_counts fake_cuda_counts;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread cudaError_t last_error;

static cudaError_t fail(cudaError_t error) { return last_error = error; }

static unsigned long setting(const char *name, unsigned long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoul(text, 0, 10) : otherwise;
}

static size_t memory_total(void) { return setting("FAKE_CUDA_MEMORY", 143771ul << 20); }
static int capability(void) { return (int)setting("FAKE_CUDA_CAPABILITY", 90); }

/* ---- Streams and captures -------------------------------------------------------------------
 *
 * A capture begins on one stream. Another stream joins it by waiting for an event that was recorded
 * inside, and has to be waited for in turn before the end. `pending`: the stream has captured work
 * that nothing has waited for.
 */

typedef struct {
    unsigned long capture; /* its number, 0: none */
    unsigned long nodes;   /* work captured on this stream so far */
    int pending, priority;
} Stream;

typedef struct {
    Stream *stream;
    unsigned long capture, nodes;
    double ms;
    int recorded;
} Event;

typedef struct {
    unsigned long nodes;
} Graph;

enum { MAX_STREAMS = 4096 };
static Stream default_stream, *streams[MAX_STREAMS] = {&default_stream};
static int stream_count = 1;
static unsigned long capture_count, active_capture, active_nodes;
static Stream *origin;
/* Set in the thread that began a capture, unless its mode is relaxed: some calls are forbidden. */
static __thread int restricted;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

#define REFUSE_IN_CAPTURE() \
    do { \
        if (restricted && thread_mode != cudaStreamCaptureModeRelaxed) \
            return fail(cudaErrorStreamCaptureUnsupported); \
    } while (0)

static Stream *stream_of(cudaStream_t handle) {
    return (uintptr_t)handle < 16 ? &default_stream : (Stream *)handle;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

/* Return whether work on `stream` becomes part of a graph. Work beside a capture counts as stray if
 * the capturing thread, or the one that computes its gradients, launches it. */
static int captured(Stream *stream, int by_kernel) {
    if (stream->capture) {
        stream->nodes++;
        stream->pending = 1;
        __atomic_add_fetch(&active_nodes, 1, __ATOMIC_RELAXED);
        COUNT(captured);
        return 1;
    }
    if (active_capture && (by_kernel || restricted)) {
        COUNT(stray);
        if (setting("FAKE_CUDA_STOP_AT_STRAY", 0)) abort(); /* python -X faulthandler says where */
    }
    return 0;
}

/* A kernel of a library on its stream. */
int fake_library_call(void *stream) {
    COUNT(library_calls);
    captured(stream_of((cudaStream_t)stream), 1);
    return 0;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    Stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    pthread_mutex_lock(&lock);
    if (stream_count == MAX_STREAMS) abort();
    streams[stream_count++] = made;
    pthread_mutex_unlock(&lock);
    *stream = (cudaStream_t)made;
    return ok;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
    return cudaStreamCreateWithPriority(s, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return ok; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) {
    *priority = stream_of(s)->priority;
    return ok;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return ok;
}
cudaError_t cudaStreamQuery(cudaStream_t s) {
    return stream_of(s)->capture ? fail(cudaErrorStreamCaptureUnsupported) : ok;
}
cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    COUNT(waits);
    if (stream_of(s)->capture) return fail(cudaErrorStreamCaptureUnsupported);
    REFUSE_IN_CAPTURE();
    return ok;
}
cudaError_t cudaDeviceSynchronize(void) {
    COUNT(waits);
    REFUSE_IN_CAPTURE();
    return ok;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    *status = stream_of(s)->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return ok;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
    Stream *stream = stream_of(s);
    cudaStreamIsCapturing(s, status);
    if (!stream->capture) return ok;
    if (id) *id = stream->capture;
    if (graph) *graph = (cudaGraph_t)origin;
    if (dependencies) *dependencies = 0;
    if (edges) *edges = 0;
    if (count) *count = 0;
    return ok;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return ok;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    Stream *stream = stream_of(s);
    if (stream == &default_stream || active_capture)
        return fail(cudaErrorStreamCaptureUnsupported);
    stream->capture = active_capture = ++capture_count;
    origin = stream;
    active_nodes = 0;
    restricted = mode != cudaStreamCaptureModeRelaxed;
    return ok;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *graph) {
    Stream *stream = stream_of(s);
    if (!stream->capture || stream != origin) return fail(cudaErrorIllegalState);
    int unjoined = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < stream_count; i++) {
        unjoined += streams[i] != stream && streams[i]->capture && streams[i]->pending;
        streams[i]->capture = streams[i]->pending = 0;
    }
    pthread_mutex_unlock(&lock);
    active_capture = 0;
    restricted = 0;
    origin = 0;
    *graph = 0;
    if (unjoined) return fail(cudaErrorStreamCaptureUnjoined);
    Graph *made = calloc(1, sizeof *made);
    made->nodes = active_nodes;
    *graph = (cudaGraph_t)made;
    COUNT(graphs);
    return ok;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    return ok;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return ok; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t s) {
    Event *e = (Event *)event;
    Stream *stream = stream_of(s);
    *e = (Event){stream, stream->capture, stream->nodes, now_ms(), 1};
    return ok;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t s, unsigned flags) {
    return cudaEventRecord(event, s);
}
static int in_active_capture(Event *e) { return e->capture && e->capture == active_capture; }
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (in_active_capture((Event *)event)) return fail(cudaErrorCapturedEvent);
    REFUSE_IN_CAPTURE();
    return ok;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    COUNT(waits);
    return cudaEventQuery(event);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(((Event *)to)->ms - ((Event *)from)->ms);
    return ok;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t event, unsigned flags) {
    Event *e = (Event *)event;
    Stream *stream = stream_of(s);
    if (in_active_capture(e)) {
        if (stream != e->stream) {
            if (e->nodes == e->stream->nodes) e->stream->pending = 0;
            stream->capture = e->capture;
            stream->pending = stream != origin;
        }
    } else if (stream->capture && e->recorded && !e->capture) {
        return fail(cudaErrorStreamCaptureIsolation);
    }
    return ok;
}

/* ---- Graphs ---------------------------------------------------------------------------------- */

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph,
                                          unsigned long long flags) {
    Graph *copy = malloc(sizeof *copy);
    *copy = *(Graph *)graph;
    *made = (cudaGraphExec_t)copy;
    return ok;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t g, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(made, g, flags);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t s) {
    COUNT(graph_launches);
    fake_cuda_counts.replayed += ((Graph *)graph)->nodes;
    captured(stream_of(s), 1);
    return ok;
}
/* Callers only need to know whether there is any. */
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    *count = ((Graph *)graph)->nodes > 0;
    return ok;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies,
                                         cudaGraphEdgeData *edges, size_t *count) {
    *count = 0;
    return ok;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return ok;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    free(graph);
    return ok;
}
cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy,
                                 unsigned references, unsigned flags) {
    *object = (cudaUserObject_t)pointer;
    return ok;
}

/* ---- Memory: device memory is address space, of which only what is written takes room --------- */

typedef struct {
    char *start;
    size_t size;
    enum cudaMemoryType type;
} Region;
enum { MAX_REGIONS = 1 << 16 };
static Region regions[MAX_REGIONS];
static int region_count;
static size_t device_used;

static void remember(void *start, size_t size, enum cudaMemoryType type) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < region_count && regions[i].start) i++;
    if (i == MAX_REGIONS) abort();
    if (i == region_count) region_count++;
    regions[i] = (Region){start, size, type};
    if (type == cudaMemoryTypeDevice) device_used += size;
    pthread_mutex_unlock(&lock);
}
static size_t forget(void *start) {
    size_t size = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < region_count; i++)
        if (regions[i].start == start) {
            size = regions[i].size;
            if (regions[i].type == cudaMemoryTypeDevice) device_used -= size;
            regions[i].start = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return size;
}
static enum cudaMemoryType type_of(const void *pointer) {
    enum cudaMemoryType type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < region_count; i++) {
        size_t offset = (size_t)((const char *)pointer - regions[i].start);
        if (regions[i].start && offset < regions[i].size) {
            type = regions[i].type;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return type;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    REFUSE_IN_CAPTURE();
    COUNT(allocations);
    size = (size + PAGE - 1) / PAGE * PAGE;
    if (device_used + size > memory_total()) return fail(cudaErrorMemoryAllocation);
    *pointer = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                    -1, 0);
    if (*pointer == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    remember(*pointer, size, cudaMemoryTypeDevice);
    return ok;
}
cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t s) { return cudaMalloc(p, size); }
cudaError_t cudaMallocManaged(void **p, size_t size, unsigned flags) { return cudaMalloc(p, size); }
cudaError_t cudaFree(void *pointer) {
    if (!pointer) return ok;
    REFUSE_IN_CAPTURE();
    munmap(pointer, forget(pointer));
    return ok;
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t s) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    REFUSE_IN_CAPTURE();
    if (posix_memalign(pointer, PAGE, size ? size : 512)) return fail(cudaErrorMemoryAllocation);
    remember(*pointer, size, cudaMemoryTypeHost);
    return ok;
}
cudaError_t cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
cudaError_t cudaFreeHost(void *pointer) {
    REFUSE_IN_CAPTURE();
    forget(pointer);
    free(pointer);
    return ok;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    remember(pointer, size, cudaMemoryTypeHost);
    return ok;
}
cudaError_t cudaHostUnregister(void *pointer) {
    forget(pointer);
    return ok;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = memory_total();
    *free_bytes = *total - device_used;
    return ok;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *pointer) {
    memset(a, 0, sizeof *a);
    a->type = type_of(pointer);
    if (a->type != cudaMemoryTypeUnregistered) a->devicePointer = (void *)pointer;
    if (a->type == cudaMemoryTypeHost) a->hostPointer = (void *)pointer;
    return ok;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
    COUNT(copies);
    int pageable = type_of(to) == cudaMemoryTypeUnregistered ||
                   type_of(from) == cudaMemoryTypeUnregistered;
    if (captured(stream_of(s), 0))
        return pageable ? fail(cudaErrorStreamCaptureUnsupported) : ok;
    /* To pageable memory CUDA returns when the copy is done. */
    if (type_of(to) == cudaMemoryTypeUnregistered) COUNT(waits);
    memmove(to, from, size);
    return ok;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    REFUSE_IN_CAPTURE();
    COUNT(waits);
    return cudaMemcpyAsync(to, from, size, kind, 0);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size,
                                cudaStream_t s) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, s);
}
cudaError_t cudaMemsetAsync(void *pointer, int value, size_t size, cudaStream_t s) {
    COUNT(memsets);
    if (captured(stream_of(s), 0)) return ok;
    /* Whole pages of zeros cost nothing if they are given back. */
    char *begin = (char *)(((uintptr_t)pointer + PAGE - 1) / PAGE * PAGE);
    char *end = (char *)(((uintptr_t)pointer + size) / PAGE * PAGE);
    if (value || end <= begin) {
        memset(pointer, value, size);
        return ok;
    }
    memset(pointer, 0, begin - (char *)pointer);
    madvise(begin, end - begin, MADV_DONTNEED);
    memset(end, 0, (char *)pointer + size - end);
    return ok;
}
cudaError_t cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, 0); }
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    static char room[1 << 16];
    *pointer = room;
    return ok;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static cudaError_t launch(cudaStream_t s) {
    COUNT(launches);
    captured(stream_of(s), 1);
    return ok;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t s) {
    unsigned long threads = (unsigned long)block.x * block.y * block.z;
    if (!grid.x || !grid.y || !grid.z || !threads || threads > 1024 || grid.y > 65535 ||
        grid.z > 65535)
        return fail(cudaErrorInvalidConfiguration);
    return launch(s);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t s) {
    return cudaLaunchKernel(f, grid, block, arguments, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) {
    return cudaLaunchKernel(f, c->gridDim, c->blockDim, arguments, 0, c->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
    *kernel = (cudaKernel_t)f;
    return ok;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) {
    if (!captured(stream_of(s), 0)) f(data);
    return ok;
}
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned x) {
    f(s, ok, data);
    return ok;
}
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} call;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *s) {
    call.grid = grid, call.block = block, call.shared = shared, call.stream = s;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid, *block = call.block, *shared = call.shared, *(void **)stream = call.stream;
    return ok;
}
void **__cudaRegisterFatBinary(void *binary) {
    static void *handle;
    return &handle;
}
char __cudaInitModule(void **module) { return 1; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->numRegs = 32;
    a->binaryVersion = a->ptxVersion = capability();
    a->maxDynamicSharedSizeBytes = 48 << 10;
    return ok;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f,
                                                                   int size, size_t shared,
                                                                   unsigned flags) {
    *blocks = 2;
    return ok;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *b, const void *f, int n, size_t s) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(b, f, n, s, 0);
}

/* ---- The device ------------------------------------------------------------------------------ */

/* FAKE_CUDA_DEVICES: one device under so many numbers, which share its memory and its counts. */
static int devices(void) { return (int)setting("FAKE_CUDA_DEVICES", 1); }
static __thread int current_device;
cudaError_t cudaGetDeviceCount(int *count) { return *count = devices(), ok; }
cudaError_t cudaGetDevice(int *device) { return *device = current_device, ok; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return fail(cudaErrorInvalidDevice);
    return current_device = device, ok;
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDA_VERSION_TOLD, ok; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDA_VERSION_TOLD, ok; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { return *can = 0, ok; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
    snprintf(id, size, "0000:00:00.0");
    return ok;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, FAKE_CUDA_NAME);
    pid_t own[] = {getpid(), device}; /* each process has devices of its own */
    memcpy(&p->uuid, own, sizeof own);
    p->totalGlobalMem = memory_total();
    p->major = capability() / 10, p->minor = capability() % 10;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->l2CacheSize = 50 << 20, p->memoryBusWidth = 6144, p->textureAlignment = 512;
    p->managedMemory = p->concurrentKernels = p->unifiedAddressing = 1;
    return ok;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    cudaGetDeviceProperties(&p, device);
    switch ((int)attribute) {
        case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
        case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
        case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = (int)p.sharedMemPerMultiprocessor;
            break;
        case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; break;
        case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
        case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; break;
        case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; break;
        case cudaDevAttrWarpSize: *value = p.warpSize; break;
        case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
        case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
        case cudaDevAttrMemoryClockRate: *value = 2619000; break;
        case cudaDevAttrClockRate: *value = 1980000; break;
        default: *value = 1;
    }
    return ok;
}
const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureUnjoined: return "cudaErrorStreamCaptureUnjoined";
        case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
        case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
        default: return "another CUDA error";
    }
}
const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = ok;
    return error;
}

/* ---- The driver, as torch and Triton ask for it ------------------------------------------------ */

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { return *version = CUDA_VERSION_TOLD, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetCount(int *count) { return *count = devices(), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = regions, 0; }
int cuCtxGetCurrent(void **context) { return *context = regions, 0; }
int cuCtxGetDevice(int *device) { return *device = current_device, 0; }
int cuGetErrorString(int error, const char **text) {
    return *text = cudaGetErrorName(error), 0;
}
int cuModuleLoadData(void **module, const void *image) {
    COUNT(modules);
    return *module = malloc(1), 0;
}
int cuModuleLoadDataEx(void **module, const void *image, unsigned n, void *names, void **values) {
    return cuModuleLoadData(module, image);
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
    return *function = malloc(1), 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0; /* threads of a block; registers */
    return 0;
}
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
    return *(uint64_t *)value = pointer, 0;
}
static int driver_launch(void *stream) {
    COUNT(driver_launches);
    captured(stream_of((cudaStream_t)stream), 1);
    return 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    return driver_launch(stream);
}
typedef struct { /* the beginning of CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream;
} DriverLaunch;
int cuLaunchKernelEx(const DriverLaunch *config, void *f, void **arguments, void **extra) {
    return driver_launch(config->stream);
}
int cuOccupancyMaxActiveClusters(int *count, void *f, const void *config) { return *count = 2, 0; }
static int succeed(void) { return 0; }
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = (void *)succeed;
    if (found) *found = 0;
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    cuGetProcAddress_v2(name, function, version, flags, 0);
    if (found) *found = cudaDriverEntryPointSuccess;
    return ok;
}
/* The real compiler of kernels that torch writes as text (exp2 of float64) requests an internal table
 * of the driver: return one that holds only its size. */
int cuGetExportTable(const void **table, const void *which) {
    static const size_t empty = sizeof empty;
    return *table = &empty, 0;
}
