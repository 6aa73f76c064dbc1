# megacore_find_cutlass(): sets MEGACORE_CUTLASS_INCLUDE to CUTLASS's header folder (headers only, nothing is compiled),
# or to nothing, with a warning, where they cannot be had.
#
# First hit wins: CUTLASS_ROOT (CMake variable or environment; a folder that holds include/cutlass/cutlass.h),
# an earlier download in the build folder, the pinned wheel from the Python package index (checked by its hash).
set(MEGACORE_CUTLASS_VERSION 4.2.0.0)
set(MEGACORE_CUTLASS_SHA256 f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6)

function(megacore_find_cutlass)
  if(DEFINED ENV{CUTLASS_ROOT} AND NOT CUTLASS_ROOT)
    set(CUTLASS_ROOT $ENV{CUTLASS_ROOT})
  endif()
  if(CUTLASS_ROOT)
    if(NOT EXISTS "${CUTLASS_ROOT}/include/cutlass/cutlass.h")
      message(FATAL_ERROR "CUTLASS_ROOT is '${CUTLASS_ROOT}', but it holds no include/cutlass/cutlass.h. "
        "Point it at a CUTLASS ${MEGACORE_CUTLASS_VERSION} tree, or unset it to fetch the pinned wheel.")
    endif()
    set(MEGACORE_CUTLASS_INCLUDE "${CUTLASS_ROOT}/include" PARENT_SCOPE)
    return()
  endif()

  set(folder "${CMAKE_BINARY_DIR}/cutlass-${MEGACORE_CUTLASS_VERSION}")
  set(include "${folder}/cutlass_library/source/include")
  if(NOT EXISTS "${include}/cutlass/cutlass.h")
    find_package(Python COMPONENTS Interpreter REQUIRED)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m pip download --no-deps --quiet --retries 1 --timeout 15 --dest "${folder}"
              "nvidia-cutlass==${MEGACORE_CUTLASS_VERSION}"
      RESULT_VARIABLE status ERROR_VARIABLE output)
    file(GLOB wheel "${folder}/nvidia_cutlass-${MEGACORE_CUTLASS_VERSION}-*.whl")
    if(NOT status EQUAL 0 OR NOT wheel)
      message(WARNING "CUTLASS headers could not be fetched: ${output}\n"
        "The CUDA module is built without grouped matrix products. Without a network, set CUTLASS_ROOT to an unpacked "
        "CUTLASS ${MEGACORE_CUTLASS_VERSION} and build again.")
      set(MEGACORE_CUTLASS_INCLUDE "" PARENT_SCOPE)
      return()
    endif()
    file(SHA256 "${wheel}" hash)
    if(NOT hash STREQUAL MEGACORE_CUTLASS_SHA256)
      file(REMOVE "${wheel}")
      message(FATAL_ERROR "${wheel} has SHA-256 ${hash}, expected ${MEGACORE_CUTLASS_SHA256}; it was removed")
    endif()
    file(ARCHIVE_EXTRACT INPUT "${wheel}" DESTINATION "${folder}" PATTERNS "cutlass_library/source/include/*")
  endif()
  set(MEGACORE_CUTLASS_INCLUDE "${include}" PARENT_SCOPE)
endfunction()
