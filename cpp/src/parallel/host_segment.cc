#include "megacore/parallel/host_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "megacore/base/check.h"

namespace megacore::parallel {
namespace {

using base::concat;

[[noreturn]] void fail(const char* what, const std::string& name, int64_t bytes, int error) {
  throw std::runtime_error(concat("cannot ",
                                  what,
                                  " a shared-memory segment of ",
                                  bytes,
                                  " bytes at ",
                                  name,
                                  ": ",
                                  std::generic_category().message(error)));
}

#if defined(__linux__)

// A file descriptor that is closed at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) {
      close(number_);
    }
  }
  int number() const { return number_; }
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// MAP_POPULATE among the flags: a page fault per page in the first collective would cost more.
std::byte* map(const Descriptor& file, const std::string& name, int64_t bytes, int flags) {
  void* memory = mmap(nullptr,
                      static_cast<size_t>(bytes),
                      PROT_READ | PROT_WRITE,
                      MAP_SHARED | flags,
                      file.number(),
                      0);
  if (memory == MAP_FAILED) {
    fail("map", name, bytes, errno);
  }
  return static_cast<std::byte*>(memory);
}

// Maps an open file of the right size.
std::byte* map_existing(const Descriptor& file, const std::string& name, int64_t bytes, int flags) {
  struct stat info{};
  if (file.number() < 0 || fstat(file.number(), &info) != 0) {
    fail("open", name, bytes, errno);
  }
  if (info.st_size != bytes) {
    throw std::runtime_error(concat(
        "the shared-memory segment at ", name, " has ", info.st_size, " bytes, not ", bytes));
  }
  return map(file, name, bytes, flags);
}

#endif

}  // namespace

#if defined(__linux__)

HostSegment HostSegment::create(const std::string& name, int64_t bytes) {
  MC_REQUIRE(bytes >= 1, "a segment of ", bytes, " bytes; it needs at least 1");
  const Descriptor file(shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  if (file.number() < 0) {
    fail("create", name, bytes, errno);
  }
  try {
    const int error = posix_fallocate(file.number(), 0, bytes);
    if (error != 0) {
      fail("reserve", name, bytes, error);
    }
    return {map(file, name, bytes, MAP_POPULATE), bytes, true};
  } catch (...) {
    remove(name);
    throw;
  }
}

HostSegment HostSegment::open(const std::string& name, int64_t bytes) {
  const Descriptor file(shm_open(name.c_str(), O_RDWR, 0));
  return {map_existing(file, name, bytes, MAP_POPULATE), bytes, true};
}

void HostSegment::remove(const std::string& name) { shm_unlink(name.c_str()); }

HostSegment HostSegment::create_unnamed(int64_t bytes) {
  MC_REQUIRE(bytes >= 1, "a segment of ", bytes, " bytes; it needs at least 1");
  const std::string name = "megacore";
  Descriptor file(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (file.number() < 0) {
    fail("create", name, bytes, errno);
  }
  const int error = posix_fallocate(file.number(), 0, bytes);
  if (error != 0) {
    fail("reserve", name, bytes, error);
  }
  HostSegment segment(map(file, name, bytes, MAP_POPULATE), bytes, true);
  segment.file_ = file.release();
  return segment;
}

HostSegment HostSegment::open_unnamed(int64_t pid, int file_number, int64_t bytes) {
  const std::string name = concat("/proc/", pid, "/fd/", file_number);
  const Descriptor file(::open(name.c_str(), O_RDWR | O_CLOEXEC));
  return {map_existing(file, name, bytes, 0), bytes, true};
}

#else

HostSegment HostSegment::create(const std::string& name, int64_t bytes) {
  fail("create", name, bytes, ENOSYS);
}

HostSegment HostSegment::open(const std::string& name, int64_t bytes) {
  fail("open", name, bytes, ENOSYS);
}

void HostSegment::remove(const std::string&) {}

HostSegment HostSegment::create_unnamed(int64_t bytes) {
  fail("create", "megacore", bytes, ENOSYS);
}

HostSegment HostSegment::open_unnamed(int64_t pid, int, int64_t bytes) {
  fail("open", concat("process ", pid), bytes, ENOSYS);
}

#endif

HostSegment::HostSegment(HostSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      is_mapped_(std::exchange(other.is_mapped_, false)),
      file_(std::exchange(other.file_, -1)) {}

void HostSegment::close_file() {
  if (file_ >= 0) {
    close(std::exchange(file_, -1));
  }
}

HostSegment::~HostSegment() {
  close_file();
  if (is_mapped_) {
    munmap(data_, static_cast<size_t>(bytes_));
  }
}

}  // namespace megacore::parallel
