/* A stand-in for the CUDA driver: as many GPUs as CUDA_VISIBLE_DEVICES names of STUB_GPUS, read once, at cuInit.
 *
 * STUB_LOG         a file; each cuInit appends "pid CUDA_VISIBLE_DEVICES"
 * STUB_NO_PEER     set: a handle opens only in a process that sees the GPU it was made on
 * STUB_NO_OPEN     set: no handle opens in another process, as in a sandbox
 * STUB_MODE        compute mode of every GPU
 * An IPC handle is the text "GPU", which says where it was made. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INVALID = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, CONTEXT = 201, PEER_UNSUPPORTED = 217 };

static int started, count;
static char visible[64][32];
static unsigned char memory[4096];

int cuInit(unsigned flags) {
    const char *env = getenv("CUDA_VISIBLE_DEVICES"), *log = getenv("STUB_LOG"), *gpus = getenv("STUB_GPUS");
    int total = gpus ? atoi(gpus) : 0;
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%d %s\n", (int)getpid(), env ? env : "(unset)");
        fclose(file);
    }
    if (started) return 0;
    started = 1;
    if (!env) {
        for (; count < total; count++) snprintf(visible[count], 32, "%d", count);
    } else {
        char copy[256], *rest = copy, *one;
        snprintf(copy, sizeof copy, "%s", env);
        while ((one = strsep(&rest, ",")) && *one && atoi(one) < total) snprintf(visible[count++], 32, "%d", atoi(one));
    }
    return count ? 0 : NO_DEVICE;
}

int cuGetErrorName(int status, const char **text) {
    *text = status == PEER_UNSUPPORTED ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" : status == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE"
        : status == CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR";
    return 0;
}
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *found) { *found = count; return started ? 0 : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int index) { *device = index; return index < count ? 0 : INVALID; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    const char *mode = getenv("STUB_MODE");
    *value = attribute == 20 && mode ? atoi(mode) : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = memory; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) { *pointer = (unsigned long long)memory; return 0; }
int cuMemcpyHtoD_v2(unsigned long long into, const void *from, size_t bytes) { memcpy((void *)into, from, bytes); return 0; }
int cuMemcpyDtoH_v2(void *into, unsigned long long from, size_t bytes) { memcpy(into, (void *)from, bytes); return 0; }

typedef struct { char bytes[64]; } handle_t;

int cuIpcGetMemHandle(handle_t *handle, unsigned long long pointer) {
    memset(handle, 0, sizeof *handle);
    strcpy(handle->bytes, visible[0]);
    return 0;
}
int cuIpcOpenMemHandle_v2(unsigned long long *pointer, handle_t handle, unsigned flags) {
    int seen = 0;
    if (getenv("STUB_NO_OPEN")) return CONTEXT;
    for (int i = 0; i < count; i++) seen |= !strcmp(visible[i], handle.bytes);
    if (!seen && getenv("STUB_NO_PEER")) return PEER_UNSUPPORTED;
    for (int i = 0; i < 4096; i++) memory[i] = (unsigned char)i;
    *pointer = (unsigned long long)memory;
    return 0;
}
