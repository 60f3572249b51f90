// Looks for accesses that interception has missed.
//
// While it is on, every operator with a managed argument is noted on its
// thread (tensors that were made from a bare storage have no keys: raw accesses
// are their way); a storage that has to
// be brought into memory by a raw access (unit.h) inside an operator was
// missed.
#pragma once

#include <string>

namespace zinf {

void start_audit();
void stop_audit();  // as often as it was started

// Whether an operator with a managed argument runs on this thread.
bool inside_operator();

// One line in the log with the operator's name.
void report_violation(const std::string& unit);

}  // namespace zinf
