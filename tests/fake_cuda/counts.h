/* Counts of the fake runtime; `Counts` of runtime.py reads it, field by field. */
struct fake_counts {
    unsigned long launches;        /* kernels of torch */
    unsigned long driver_launches; /* kernels of Triton */
    unsigned long library_calls;   /* products, convolutions, norms, LSTMs: cuBLAS and cuDNN */
    unsigned long copies, memsets;
    unsigned long waits;          /* calls that wait for the device */
    unsigned long captured;       /* pieces of work that became part of a graph */
    unsigned long stray;          /* kernels launched beside a capture */
    unsigned long graphs;         /* captures that ended well */
    unsigned long graph_launches; /* replays */
    unsigned long replayed;       /* pieces of work in them */
    unsigned long allocations;    /* cudaMalloc */
    unsigned long modules;        /* compiled modules loaded by the driver */
};
extern struct fake_counts fake_cuda_counts;
#define COUNT(what) __atomic_add_fetch(&fake_cuda_counts.what, 1, __ATOMIC_RELAXED)
int fake_library_call(void *stream);
