// Bytes on their way: from or to a disk, a device or another rank.
#pragma once

#include <memory>

#include "zinf/status.h"

namespace zinf {

// A transfer under way. Thread-safe; its memory must stay until wait() has
// returned or done() was true. The destructor waits.
class Move {
 public:
  virtual ~Move() = default;
  virtual bool done() = 0;    // never waits
  virtual Status wait() = 0;  // may be called again; gives the same answer
};

// One that is over.
std::unique_ptr<Move> finished_move(Status outcome);

}  // namespace zinf
