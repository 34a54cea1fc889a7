#include "transport/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>

#include "transport/platform.h"

namespace tilework {
namespace {

constexpr size_t kAlign = 64;
/// Freed memory is kept for the next buffer up to this, then returned to the system.
constexpr size_t kMostIdle = 64 * 1024 * 1024;

}  // namespace

Mapping::Mapping(int fd, size_t offset, size_t bytes, bool huge) : bytes_(bytes) {
  char* hint = nullptr;
  if (huge) {  // such pages begin at their multiples, in the file and in the address space
    constexpr int kNobody = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* free = mmap(nullptr, bytes + kHugePage, PROT_NONE, kNobody, -1, 0);
    if (free != MAP_FAILED && munmap(free, bytes + kHugePage) == 0)
      hint = static_cast<char*>(free) + (offset - reinterpret_cast<uintptr_t>(free)) % kHugePage;
  }
  void* place = mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                     static_cast<off_t>(offset));
  if (place == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "mmap of the segment");
  if (huge) madvise(place, bytes, MADV_HUGEPAGE);
  base_ = static_cast<char*>(place);
}

Mapping::~Mapping() { munmap(base_, bytes_); }

Arena::Arena(int fd, size_t offset, size_t bytes)
    : fd_(fd), offset_(offset), bytes_(bytes), generation_(fork_generation()) {
  if (bytes > 0) free_[0] = bytes;
}

Arena::~Arena() {
  mapping_.reset();
  close(fd_);
}

char* Arena::allocate(size_t bytes) {
  const size_t wanted = round_up(bytes, kAlign);
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation_ != fork_generation()) return nullptr;  // the arena belongs to the parent
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    const auto [begin, end] = *range;
    if (end - begin < wanted) continue;
    try {
      if (!mapping_) mapping_ = std::make_unique<Mapping>(fd_, offset_, bytes_, true);
    } catch (const std::system_error&) {
      return nullptr;  // no address space left: ordinary memory serves as well
    }
    free_.erase(range);
    if (begin + wanted < end) free_[begin + wanted] = end;
    taken_[begin] = begin + wanted;
    used_ += wanted;
    idle_ -= idle_ < wanted ? idle_ : wanted;
    return mapping_->base() + begin;
  }
  return nullptr;
}

void Arena::release(char* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation_ != fork_generation()) return;
  const auto range = taken_.find(static_cast<size_t>(memory - mapping_->base()));
  if (range == taken_.end()) return;
  size_t begin = range->first, end = range->second;
  taken_.erase(range);
  used_ -= end - begin;
  idle_ += end - begin;
  // Merge with free neighbours.
  auto next = free_.upper_bound(begin);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->second == begin) {
      begin = before->first;
      free_.erase(before);
    }
  }
  free_[begin] = end;
  if (idle_ > kMostIdle) {
    for (const auto& [from, to] : free_) punch_hole(from, to);
    idle_ = 0;
  }
}

/// Return the pages that lie wholly in a free range to the system.
void Arena::punch_hole(size_t from, size_t to) {
  const size_t first = round_up(from, kPage), last = to / kPage * kPage;
  if (first < last)
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_ + first),
              static_cast<off_t>(last - first));
}

size_t Arena::used_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

bool Arena::locate(const char* data, size_t bytes, uint64_t& offset) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_ || data < mapping_->base() || data >= mapping_->base() + bytes_) return false;
  offset = static_cast<uint64_t>(data - mapping_->base());
  return bytes <= bytes_ - offset;
}

void Arena::detach(const char* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!mapping_ || bytes == 0 || generation_ != fork_generation()) return;
  const size_t begin = static_cast<size_t>(data - mapping_->base());
  const size_t first = begin / kPage * kPage;
  const size_t last = std::min(bytes_, round_up(begin + bytes, kPage));
  char* const pages = mapping_->base() + first;
  if (mmap(pages, last - first, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
           fd_, static_cast<off_t>(offset_ + first)) == MAP_FAILED)
    return;  // no room for one mapping more: nothing can be done about a peer that comes late
  // A page that was not written yet still shows the file's. Writing what it holds, atomically since
  // another thread may write to it, has the kernel copy it.
  for (size_t at = 0; at < last - first; at += kPage)
    __atomic_fetch_or(pages + at, char{0}, __ATOMIC_RELAXED);
}

}  // namespace tilework
