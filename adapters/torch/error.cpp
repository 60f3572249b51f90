#include "adapters/torch/error.h"

namespace zinf {

Error::Error(const Status& status)
    : std::runtime_error(status.text()), code_(status.code()) {}

void throw_if_error(const Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace zinf
