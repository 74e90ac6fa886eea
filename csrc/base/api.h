// Symbol visibility and the host/device function marker; the only place that knows the compiler.
#pragma once

#define PC_API __attribute__((visibility("default")))

#if defined(__CUDACC__)
#define PC_HD __host__ __device__
#else
#define PC_HD
#endif
