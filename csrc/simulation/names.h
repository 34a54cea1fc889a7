// Names of places: in segments, in files of code.
#pragma once

#include <sys/types.h>

#include <string>

namespace tilework::simulation {

/// A name for a part of a segment that has just been mapped; remembers where it is.
std::string name_mapping(ino_t file, const void* address, off_t offset);
void forget_names();

/// A name for an address: what it is, or in what; the bare number if nothing is known of it.
std::string name_of(const void* address);
/// A place in the code, as file and line.
std::string code_place(const void* code);

}  // namespace tilework::simulation
