// The functions of libcuda that stand here, by the name the sources ask for.
#pragma once

namespace fake_cuda {

// nullptr: not one of them.
void* find_driver_function(const char* name);

}  // namespace fake_cuda
