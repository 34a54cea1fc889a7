#include "names.h"

#include <link.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "transport/segment.h"

namespace tilework::simulation {
namespace {

constexpr int kFileShift = 44;  // files lie so far apart
constexpr Place kFirstPlace = Place{1} << 56;

struct KnownFile {
  ino_t file;
  std::optional<SegmentLayout> layout;  // none: a rank's own memory
};
std::vector<KnownFile> files;

/// A field of a RankControl, by its offset.
std::string control_field(size_t at) {
  struct Field {
    size_t begin;
    const char* name;
  };
  static const Field fields[] = {
      {offsetof(RankControl, core), "core"},
      {offsetof(RankControl, round_event) + offsetof(EventCount, word), "round_event.word"},
      {offsetof(RankControl, round_event) + offsetof(EventCount, waiters), "round_event.waiters"},
      {offsetof(RankControl, message_event) + offsetof(EventCount, word), "message_event.word"},
      {offsetof(RankControl, message_event) + offsetof(EventCount, waiters),
       "message_event.waiters"},
      {offsetof(RankControl, pid), "pid"},
      {offsetof(RankControl, departed), "departed"},
      {offsetof(RankControl, pid_namespace), "pid_namespace"},
      {offsetof(RankControl, start_time), "start_time"},
      {offsetof(RankControl, cores), "cores"},
      {offsetof(RankControl, core_limit), "core_limit"},
      {offsetof(RankControl, entered), "entered"},
      {offsetof(RankControl, held), "held"},
      {offsetof(RankControl, blocked), "blocked"},
      {offsetof(RankControl, headers), "headers"},
      {offsetof(RankControl, report), "report"},
  };
  const Field* last = &fields[0];
  for (const Field& field : fields)
    if (field.begin <= at && field.begin >= last->begin) last = &field;
  return at == last->begin ? last->name
                           : std::string(last->name) + "+" + std::to_string(at - last->begin);
}

std::string number(size_t value) { return std::to_string(value); }

/// The name of a place in a segment. Ranks are those of the group.
std::string place_in(const SegmentLayout& layout, size_t at) {
  const size_t size = layout.size;
  if (at < sizeof(GroupHeader)) return "header+" + number(at);
  if (at < layout.tables) {
    const size_t in_controls = at - sizeof(GroupHeader);
    return "rank " + number(in_controls / sizeof(RankControl)) + "'s " +
           control_field(in_controls % sizeof(RankControl));
  }
  if (at < layout.cursors) return "tables+" + number(at - layout.tables);
  if (at < layout.outboxes) {
    const size_t cursor = (at - layout.cursors) / sizeof(Cursor);
    const bool head = (at - layout.cursors) % sizeof(Cursor) < offsetof(Cursor, tail);
    return std::string(head ? "head" : "tail") + " of channel " + number(cursor % size) + " to " +
           number(cursor / size);
  }
  if (at < layout.channels) {
    const size_t slot = (at - layout.outboxes) / layout.slot_bytes;
    return "rank " + number(slot / 2) + "'s slot " + number(slot % 2) + "+" +
           number((at - layout.outboxes) % layout.slot_bytes);
  }
  if (at >= layout.arenas)
    return "rank " + number((at - layout.arenas) / layout.arena_bytes) + "'s arena+" +
           number((at - layout.arenas) % layout.arena_bytes);
  const size_t channel = (at - layout.channels) / layout.ring_bytes;
  return "channel " + number(channel % size) + " to " + number(channel / size) + "+" +
         number((at - layout.channels) % layout.ring_bytes);
}

/// Where the program was loaded.
uintptr_t load_address() {
  uintptr_t result = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        *static_cast<uintptr_t*>(found) = info->dlpi_addr;
        return 1;
      },
      &result);
  return result;
}

}  // namespace

Place place_of_file(ino_t file, const void* mapped) {
  for (size_t i = 0; i < files.size(); ++i)
    if (files[i].file == file) return kFirstPlace + (Place{i} << kFileShift);
  const Identity& identity = static_cast<const GroupHeader*>(mapped)->identity;
  files.push_back({file, std::nullopt});
  if (identity.magic != 0)
    files.back().layout.emplace(static_cast<int>(identity.size), identity.slot_bytes,
                                identity.arena_bytes);
  return kFirstPlace + (Place{files.size() - 1} << kFileShift);
}

Place new_place() {
  files.push_back({0, std::nullopt});
  return kFirstPlace + (Place{files.size() - 1} << kFileShift);
}

void forget_places() { files.clear(); }

std::string name_of(Place place) {
  if (place < kFirstPlace) return "a rank's own variable";
  const size_t file = (place - kFirstPlace) >> kFileShift;
  const size_t offset = place & ((Place{1} << kFileShift) - 1);
  if (!files[file].layout) return "a caller's memory+" + number(offset);
  return "group " + number(file) + ", " + place_in(*files[file].layout, offset);
}

std::string code_place(const void* code) {
  static std::map<const void*, std::string> known;
  std::string& result = known[code];
  if (!result.empty()) return result;
  result = "?";
  char command[256], line[512];
  // The functions that were inlined there follow each other, the innermost first.
  char program[160] = {};
  if (readlink("/proc/self/exe", program, sizeof program - 1) < 0) return result;
  snprintf(command, sizeof command, "addr2line -i -e '%s' %#lx 2>/dev/null", program,
           static_cast<unsigned long>(reinterpret_cast<uintptr_t>(code) - load_address() - 1));
  FILE* pipe = popen(command, "r");
  if (!pipe) return result;
  while (fgets(line, sizeof line, pipe)) {
    line[strcspn(line, "\n ")] = 0;
    const char* inside = strstr(line, "/csrc/");
    if (result == "?" || inside) result = inside ? inside + 1 : line;
    if (inside) break;
  }
  pclose(pipe);
  return result;
}

}  // namespace tilework::simulation
