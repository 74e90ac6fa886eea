// Host loops for any processor: what the compiler makes of the plain code.
#include "codec/host_loops.h"

namespace pipecomm {

const HostLoops kPortableLoops = {"portable", &encode_with<PlainOps>, &decode_with<PlainOps>};

}  // namespace pipecomm
