/* A stand-in for NVML, which sees one device. */
int nvmlInit_v2(void) { return 0; }

int nvmlInit(void) { return 0; }

int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return 0;
}

int nvmlDeviceGetCount(unsigned *count) { return nvmlDeviceGetCount_v2(count); }
