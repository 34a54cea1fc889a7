// Names of places: in segments, in files of code.
#pragma once

#include <sys/types.h>

#include <string>

#include "memory.h"

namespace tilework::simulation {

/// The place of a file's first byte. `mapped` shows that byte, the first time that a file is asked for.
Place place_of_file(ino_t file, const void* mapped);
/// A place of which nothing else is known, for memory that one rank alone maps.
Place new_place();
void forget_places();

/// A name for a place, 0 included.
std::string name_of(Place place);
/// A place in the code, as file and line.
std::string code_place(const void* code);

}  // namespace tilework::simulation
