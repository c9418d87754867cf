/* A stand-in for NVIDIA's driver, with one device. It notes who initializes it in the file
   that STUB_CALLS names, and like the driver it is of no use to a fork of that process. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_INITIALIZED = 3, NOT_SUPPORTED = 801 };
static pid_t owner;

static int state(void) { return owner == getpid() ? SUCCESS : NOT_INITIALIZED; }

static int refuse(void) { return NOT_SUPPORTED; }

int cuInit(unsigned flags) {
    const char *path = getenv("STUB_CALLS");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (file >= 0) {
        dprintf(file, "%d cuInit\n", getpid());
        close(file);
    }
    if (!owner)
        owner = getpid();
    return state();
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    if (state() == SUCCESS)
        *count = 1;
    return state();
}

int cuDeviceGet(int *device, int index) {
    *device = index;
    return state();
}

int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int *why) {
    *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (!*found)
        *found = (void *)refuse;
    if (why)
        *why = 0;
    return SUCCESS;
}

int cuGetProcAddress(const char *name, void **found, int version, unsigned long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, NULL);
}
