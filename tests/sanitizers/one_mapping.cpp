// For ThreadSanitizer, which identifies memory by its address: ranks that are threads of one process
// map a segment at one address, so that their accesses count as accesses to the same memory.
// Linked with --wrap=mmap and --wrap=munmap.
//
// What is mapped at a fixed address stays there: that is no segment, and the next mapping may take its
// place without munmap(), of which this would not hear.
#include <sys/mman.h>
#include <sys/stat.h>

#include <map>
#include <mutex>
#include <tuple>

namespace {

struct Mapping {
  void* address;
  int users;
};
using Part = std::tuple<dev_t, ino_t, off_t>;  // of a file

std::mutex mutex;
std::map<Part, Mapping> mappings;

}  // namespace

extern "C" {

void* __real_mmap(void*, size_t, int, int, int, off_t);
int __real_munmap(void*, size_t);

void* __wrap_mmap(void* hint, size_t bytes, int protection, int flags, int fd, off_t offset) {
  struct stat status;
  if (!(flags & MAP_SHARED) || (flags & MAP_FIXED) || fstat(fd, &status) != 0)
    return __real_mmap(hint, bytes, protection, flags, fd, offset);
  std::lock_guard<std::mutex> lock(mutex);
  Mapping& mapping = mappings[{status.st_dev, status.st_ino, offset}];
  if (mapping.users == 0) mapping.address = __real_mmap(hint, bytes, protection, flags, fd, offset);
  if (mapping.address != MAP_FAILED) ++mapping.users;
  return mapping.address;
}

int __wrap_munmap(void* address, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto at = mappings.begin(); at != mappings.end(); ++at) {
    if (at->second.address != address || at->second.users == 0) continue;
    if (--at->second.users > 0) return 0;
    mappings.erase(at);
    break;
  }
  return __real_munmap(address, bytes);
}

}  // extern "C"
