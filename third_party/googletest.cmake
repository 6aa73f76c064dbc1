# Provides GTest::gtest_main, built from source so that it carries the same flags (sanitizers) as the tests.
# Sources, first hit wins: GTEST_ROOT, Debian's libgtest-dev, the release archive (needs the network).
set(MEGACORE_GTEST_VERSION 1.15.2)
set(MEGACORE_GTEST_SHA256 7b42b4d6ed48810c5362c265a17faebe90dc2373c885e5216439d37927f02926)

if(DEFINED ENV{GTEST_ROOT} AND NOT GTEST_ROOT)
  set(GTEST_ROOT $ENV{GTEST_ROOT})
endif()
set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)

if(GTEST_ROOT)
  add_subdirectory(${GTEST_ROOT} ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
elseif(EXISTS /usr/src/googletest/CMakeLists.txt)
  add_subdirectory(/usr/src/googletest ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
else()
  include(FetchContent)
  FetchContent_Declare(googletest
    URL https://github.com/google/googletest/releases/download/v${MEGACORE_GTEST_VERSION}/googletest-${MEGACORE_GTEST_VERSION}.tar.gz
    URL_HASH SHA256=${MEGACORE_GTEST_SHA256})
  FetchContent_MakeAvailable(googletest)
endif()

if(NOT TARGET GTest::gtest_main)
  add_library(GTest::gtest_main ALIAS gtest_main)
endif()
megacore_sanitize(gtest)
target_compile_options(gtest PRIVATE -O1)
