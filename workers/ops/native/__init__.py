"""C++ kernels, compiled once for this machine's CPU and loaded with ctypes."""
