// Memory shared by several processes of one host.
//
// One process creates a segment under a name, the others open it by that name. Once all have opened
// it, the name is removed, and the memory is freed when the last process has closed it or died, so
// nothing remains however a process ends. Linux only: elsewhere `create` and `open` throw.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace megacore::parallel {

class HostSegment {
 public:
  // New memory, all zero. It is reserved at once, so that a full /dev/shm is an error here and not
  // a SIGBUS later.
  // REQUIRES: `name` is "/" and a file name; bytes >= 1.
  // Throws std::runtime_error with the system's reason.
  static HostSegment create(const std::string& name, int64_t bytes);

  // The memory created by another process. Throws std::runtime_error if it does not exist with this
  // size.
  static HostSegment open(const std::string& name, int64_t bytes);

  // New memory without a name, all zero, reserved at once. It does not count against the size of
  // /dev/shm. Others open it by this process and file() until close_file().
  // Throws std::runtime_error with the system's reason.
  static HostSegment create_unnamed(int64_t bytes);

  // The memory of process `pid` with file number `file`. Throws std::runtime_error if it does not
  // exist, has another size, or is not accessible.
  static HostSegment open_unnamed(int64_t pid, int file, int64_t bytes);

  // Memory of the caller, for members that are threads of one process. Not freed.
  static HostSegment over(std::byte* data, int64_t bytes) { return {data, bytes, false}; }

  // Removes the name; existing mappings stay valid. A no-op if the name does not exist.
  static void remove(const std::string& name);

  HostSegment(HostSegment&& other) noexcept;
  HostSegment& operator=(HostSegment&&) = delete;
  ~HostSegment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  int file() const { return file_; }  // -1 if there is none (any more)
  void close_file();

 private:
  HostSegment(std::byte* data, int64_t bytes, bool is_mapped)
      : data_(data), bytes_(bytes), is_mapped_(is_mapped) {}

  std::byte* data_;
  int64_t bytes_;
  bool is_mapped_;
  int file_ = -1;
};

}  // namespace megacore::parallel
