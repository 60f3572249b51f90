// What a save or a run that was killed leaves in a directory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/tier/descriptor.h"

namespace zinf::tier {

std::vector<std::string> names_in(int directory);

// One in it, itself and no symbolic link; empty on failure.
Descriptor enter_directory(int directory, const std::string& name);

// "x.unfinished-0123456789abcdef"; earlier versions had a pid there, or
// nothing.
bool is_unfinished(std::string_view name);

// The disk space of what saves and stores put into the directory of an
// unfinished one; nothing when it has something else too.
std::optional<std::uint64_t> leftover_bytes(int directory);

// Removes that.
void remove_leftover(int directory);

}  // namespace zinf::tier
