"""Our own C++ kernels for the CPU they run on, compiled once on this machine and loaded with ctypes."""
