/* cuBLAS and cuDNN without a device: their answers to torch before and around their kernels.
 *
 * A product, convolution or LSTM is one library call on the stream of its handle. __init__.py makes
 * the calls that need no answer, from the names that torch uses. Workspaces are small, so the memory
 * of a step is that of its tensors; a real library takes more.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "counts.h"

typedef struct {
    void *stream;
} Handle;

enum { SMALL = 1024, DESCRIPTOR = 512 };

/* A handle or a descriptor of any kind. */
int fake_make(void **made) { return *made = calloc(1, DESCRIPTOR), 0; }
int cublasSetStream_v2(Handle *handle, void *stream) { return handle->stream = stream, 0; }
int cudnnSetStream(Handle *handle, void *stream) { return handle->stream = stream, 0; }
int cudnnGetStream(Handle *handle, void **stream) { return *stream = handle->stream, 0; }
/* A function that computes and is not written out below. */
int fake_compute(Handle *handle) { return fake_library_call(handle->stream); }

/* ---- cuBLAS */

int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
size_t cublasLtGetVersion(void) { return 130400; }
typedef struct { /* cublasLtMatmulHeuristicResult_t */
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Heuristic;
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int asked, Heuristic *found,
                                   int *count) {
    memset(found, 0, sizeof *found);
    return *count = 1, 0;
}
int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *A, void *a,
                   const void *B, void *b, const void *beta, const void *C, void *c, void *D,
                   void *d, const void *algorithm, void *workspace, size_t size, void *stream) {
    return fake_library_call(stream);
}

/* ---- cuDNN: descriptors that torch reads back */

enum { VERSION = 92600 };
size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return 13020; }
int cudnnGetProperty(int which, int *value) {
    int parts[] = {VERSION / 10000, VERSION / 100 % 100, VERSION % 100};
    return *value = parts[which], 0;
}
const char *cudnnGetErrorString(int status) { return "an error of the fake cuDNN"; }
void cudnnGetLastErrorString(char *text, size_t size) {
    if (size) *text = 0;
}

typedef struct {
    int dtype, dimensions, sizes[8], strides[8];
} Tensor;
int cudnnSetTensorNdDescriptor(Tensor *t, int dtype, int n, const int *sizes, const int *strides) {
    t->dtype = dtype;
    t->dimensions = n;
    memcpy(t->sizes, sizes, n * sizeof(int));
    memcpy(t->strides, strides, n * sizeof(int));
    return 0;
}
int cudnnGetTensorNdDescriptor(const Tensor *t, int most, int *dtype, int *n, int *sizes,
                               int *strides) {
    int count = t->dimensions < most ? t->dimensions : most;
    *dtype = t->dtype;
    *n = t->dimensions;
    if (sizes) memcpy(sizes, t->sizes, count * sizeof(int));
    if (strides) memcpy(strides, t->strides, count * sizeof(int));
    return 0;
}

/* ---- cuDNN: where an RNN's weights lie in one buffer, as torch flattens them
 *
 * Matrices layer by layer (two directions are two layers), each layer's input matrices, then its
 * recurrent ones, then the projection; biases behind all of them.
 */

typedef struct {
    int gates, dtype, input, hidden, projection, layers, directions;
} Rnn;
enum { LSTM = 2, GRU = 3 };

int cudnnSetRNNDescriptor_v8(Rnn *rnn, int algorithm, int cell, int bias, int direction, int mode,
                             int dtype, int math, int math_type, int32_t input, int32_t hidden,
                             int32_t projection, int32_t layers, void *dropout, uint32_t flags) {
    int gates = cell == LSTM ? 4 : cell == GRU ? 3 : 1;
    *rnn = (Rnn){gates, dtype, input, hidden, projection, layers, direction ? 2 : 1};
    return 0;
}
static int value_size(const Rnn *rnn) { return rnn->dtype == 0 ? 4 : rnn->dtype == 1 ? 8 : 2; }
static int projected(const Rnn *rnn) {
    return rnn->projection && rnn->projection != rnn->hidden;
}
static int matrices(const Rnn *rnn) { return 2 * rnn->gates + projected(rnn); }
static size_t matrix(const Rnn *rnn, int layer, int id, int *rows, int *columns) {
    int out = projected(rnn) ? rnn->projection : rnn->hidden;
    *rows = id < 2 * rnn->gates ? rnn->hidden : rnn->projection;
    if (id < rnn->gates)
        *columns = layer < rnn->directions ? rnn->input : out * rnn->directions;
    else
        *columns = id < 2 * rnn->gates ? out : rnn->hidden;
    return (size_t)*rows * *columns;
}
static size_t before(const Rnn *rnn, int layer, int id) {
    size_t sum = 0;
    int rows, columns;
    for (int l = 0; l <= layer; l++)
        for (int i = 0; i < (l < layer ? matrices(rnn) : id); i++)
            sum += matrix(rnn, l, i, &rows, &columns);
    return sum;
}
static size_t all_matrices(const Rnn *rnn) { return before(rnn, rnn->layers * rnn->directions, 0); }
static size_t biases(const Rnn *rnn, int layer) {
    return (size_t)layer * 2 * rnn->gates * rnn->hidden;
}
int cudnnGetRNNWeightSpaceSize(void *handle, Rnn *rnn, size_t *bytes) {
    *bytes = (all_matrices(rnn) + biases(rnn, rnn->layers * rnn->directions)) * value_size(rnn);
    return 0;
}
static void describe(Tensor *t, int dtype, int rows, int columns) {
    *t = (Tensor){dtype, 3, {1, rows, columns}, {rows * columns, columns, 1}};
}
int cudnnGetRNNWeightParams(void *handle, Rnn *rnn, int32_t layer, size_t size, const char *weights,
                            int32_t id, Tensor *of_matrix, const void **at_matrix, Tensor *of_bias,
                            const void **at_bias) {
    int rows, columns, bytes = value_size(rnn);
    size_t start = before(rnn, layer, id);
    matrix(rnn, layer, id, &rows, &columns);
    if (of_matrix) describe(of_matrix, rnn->dtype, rows, columns);
    if (at_matrix) *at_matrix = weights + start * bytes;
    int has_bias = id < 2 * rnn->gates;
    size_t bias = all_matrices(rnn) + biases(rnn, layer) + (size_t)id * rnn->hidden;
    if (of_bias) describe(of_bias, rnn->dtype, rnn->hidden, 1);
    if (of_bias && !has_bias) of_bias->dimensions = 0;
    if (at_bias) *at_bias = has_bias ? weights + bias * bytes : 0;
    return 0;
}
int cudnnGetRNNTempSpaceSizes(void *handle, Rnn *rnn, int mode, void *data, size_t *workspace,
                              size_t *reserve) {
    if (workspace) *workspace = SMALL;
    if (reserve) *reserve = SMALL;
    return 0;
}
int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { return *bytes = 1 << 20, 0; }

/* ---- cuDNN: norms and convolutions */

int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int operation,
                                                             void *x, void *z, void *y, void *s,
                                                             void *a, size_t *bytes) {
    return *bytes = SMALL, 0;
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int operation, void *x,
                                                      void *y, void *dy, void *dz, void *dx,
                                                      void *s, void *a, size_t *bytes) {
    return *bytes = SMALL, 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int operation, void *a,
                                                         void *x, size_t *bytes) {
    return *bytes = SMALL, 0;
}

/* The graph interface (version 8 and later): torch builds an operation, asks for engines and takes the
 * first plan that finalizes. A descriptor that a caller has made is as good an answer as any. */
enum { INT64 = 3, INT32 = 23, DESCRIPTORS = 15, KNOB_CHOICES = 302 };
int cudnnBackendCreateDescriptor(int type, void **descriptor) { return fake_make(descriptor); }
int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t room, int64_t *count,
                             void *values) {
    int64_t there = type == INT64 || type == INT32 || (type == DESCRIPTORS && name != KNOB_CHOICES);
    if (count) *count = there;
    if (there && values && type != DESCRIPTORS) memset(values, 0, type == INT64 ? 8 : 4);
    return 0;
}
int cudnnBackendExecute(Handle *handle, void *plan, void *tensors) { return fake_compute(handle); }
