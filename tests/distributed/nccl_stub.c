/* NCCL without a network: torch's own ProcessGroupNCCL, its watchdog included, runs over it.
 *
 * Preloaded before the fake CUDA runtime, whose events and streams it makes wait: the n-th
 * collective of a rank has ended when all ranks have begun their n-th. Nothing is exchanged.
 * Environment: NCCL_STUB_BOARD, a file of 64 zeros of 8 bytes: what each rank has begun; in the last
 * one how many have taken their communicator down.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { READY = 0, NOT_READY = 600, MOST = 1 << 16, RANKS = 64 };
typedef struct {
    int rank, count;
} Comm;
typedef struct {
    char bytes[128];
} Id;
typedef int (*Call)();

static volatile long *board;
static int ranks = 1;

/* ---- Which collective a stream or an event waits for: the newest before it --------------------- */

static struct {
    void *key;
    long number;
} table[MOST];
static long *waits_for(void *key) {
    size_t i = ((size_t)key >> 4) % MOST;
    while (table[i].key && table[i].key != key) i = (i + 1) % MOST;
    table[i].key = key;
    return &table[i].number;
}
static int ended(long number) {
    for (int rank = 0; number && rank < ranks; rank++)
        if (__atomic_load_n(&board[rank], __ATOMIC_SEQ_CST) < number) return 0;
    return 1;
}
static void wait_until_ended(void *key) {
    while (!ended(*waits_for(key))) usleep(5000);
}
static void *stream_key(void *stream) { return (size_t)stream < 16 ? (void *)16 : stream; }

#define NEXT(name) \
    static Call next; \
    if (!next) next = (Call)dlsym(RTLD_NEXT, name)

int cudaEventRecord(void *event, void *stream) {
    NEXT("cudaEventRecord");
    *waits_for(event) = *waits_for(stream_key(stream));
    return next(event, stream);
}
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
    NEXT("cudaStreamWaitEvent");
    long *own = waits_for(stream_key(stream)), other = *waits_for(event);
    if (other > *own) *own = other;
    return next(stream, event, flags);
}
int cudaEventQuery(void *event) {
    NEXT("cudaEventQuery");
    return ended(*waits_for(event)) ? next(event) : NOT_READY;
}
int cudaStreamQuery(void *stream) {
    NEXT("cudaStreamQuery");
    return ended(*waits_for(stream_key(stream))) ? next(stream) : NOT_READY;
}
int cudaEventSynchronize(void *event) {
    NEXT("cudaEventSynchronize");
    wait_until_ended(event);
    return next(event);
}
int cudaStreamSynchronize(void *stream) {
    NEXT("cudaStreamSynchronize");
    wait_until_ended(stream_key(stream));
    return next(stream);
}

/* ---- NCCL -------------------------------------------------------------------------------------- */

static int joined(Comm **made, int count, int rank) {
    if (!board) {
        int file = open(getenv("NCCL_STUB_BOARD"), O_RDWR);
        board = mmap(0, RANKS * sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    *made = malloc(sizeof **made);
    **made = (Comm){rank, count};
    ranks = count;
    return 0;
}
static int begun(Comm *comm, void *stream) {
    *waits_for(stream_key(stream)) = __atomic_add_fetch(&board[comm->rank], 1, __ATOMIC_SEQ_CST);
    return 0;
}
static size_t bytes_of(int type) {
    static const char sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}
/* Device memory is the host's: each rank takes the others' values for its own. */
static void same(void *to, const void *from, size_t bytes) {
    if (to != from) memcpy(to, from, bytes);
}
int ncclGetVersion(int *version) { return *version = 22907, 0; }
int ncclGetUniqueId(Id *id) { return memset(id, 7, sizeof *id), 0; }
int ncclCommInitRank(Comm **made, int n, Id id, int rank) { return joined(made, n, rank); }
int ncclCommInitRankConfig(Comm **made, int n, Id id, int rank, void *c) {
    return joined(made, n, rank);
}
int ncclCommInitRankScalable(Comm **made, int n, int rank, int ids, Id *id, void *c) {
    return joined(made, n, rank);
}
int ncclCommCount(Comm *comm, int *count) { return *count = comm->count, 0; }
int ncclCommUserRank(Comm *comm, int *rank) { return *rank = comm->rank, 0; }
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = 0; }
const char *ncclGetErrorString(int error) { return "no error"; }
const char *ncclGetLastError(Comm *comm) { return ""; }
int ncclAllReduce(void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream) {
    same(to, from, n * bytes_of(type));
    return begun(comm, stream);
}
int ncclBroadcast(void *from, void *to, size_t n, int type, int root, Comm *comm, void *stream) {
    same(to, from, n * bytes_of(type));
    return begun(comm, stream);
}
int ncclAllGather(void *from, char *to, size_t n, int type, Comm *comm, void *stream) {
    size_t bytes = n * bytes_of(type);
    for (int rank = 0; rank < comm->count; rank++) same(to + rank * bytes, from, bytes);
    return begun(comm, stream);
}
int ncclReduceScatter(void *from, void *to, size_t n, int type, int op, Comm *comm, void *stream) {
    return begun(comm, stream);
}
/* Parts for each rank: torch sends and receives them one by one. */
int ncclSend(void *from, size_t n, int type, int to, Comm *comm, void *stream) {
    return begun(comm, stream);
}
int ncclRecv(void *to, size_t n, int type, int from, Comm *comm, void *stream) {
    return begun(comm, stream);
}
static int taken_down(Comm *comm) {
    if (comm->count) __atomic_add_fetch(&board[RANKS - 1], 1, __ATOMIC_SEQ_CST);
    comm->count = 0;
    return 0;
}
int ncclCommAbort(Comm *comm) { return taken_down(comm); }
int ncclCommDestroy(Comm *comm) { return taken_down(comm); }
#define NOTHING(name) \
    int name() { return 0; }
NOTHING(ncclCommFinalize)
NOTHING(ncclCommRegister)
NOTHING(ncclCommDeregister)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
