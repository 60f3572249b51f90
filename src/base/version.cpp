#include "zinf/version.h"

namespace zinf {

const char* version() { return ZINF_VERSION; }

}  // namespace zinf
