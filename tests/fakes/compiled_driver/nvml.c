/* A stand-in for NVML, which sees one device, and starts a thread as that of driver 580 does. */
#define _GNU_SOURCE
#include <pthread.h>
#include <unistd.h>

static void *wait_for_events(void *nothing) {
    pthread_setname_np(pthread_self(), "cuda00001400006");
    for (;;) pause();
    return nothing;
}

int nvmlInit_v2(void) {
    static pthread_t events;
    return events ? 0 : pthread_create(&events, 0, wait_for_events, 0);
}

int nvmlInit(void) { return nvmlInit_v2(); }

int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
