// Takes the place of libtorch_cpu.so when _ops is linked, which records its name: torch loads its
// libraries so that their functions are found by that name only.
extern "C" __attribute__((visibility("default"))) void megacore_libtorch_cpu_stub() {}
