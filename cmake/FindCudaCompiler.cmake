# Decides whether the CUDA module is built and for which architectures: sets MEGACORE_HAS_NVCC to yes or no
# and, where none are named, MEGACORE_CUDA_ARCHS. Most machines that compile this have no GPU to run device code on, and
# it is most of the compile time, so AUTO builds it only where a GPU is found or architectures are named.
include(CheckLanguage)
set(MEGACORE_HAS_NVCC no)
if(NOT MEGACORE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MEGACORE_CUDA must be AUTO, ON or OFF, got '${MEGACORE_CUDA}'")
endif()

# Compute capabilities of the GPUs at hand, "9.0" as "90a": from 90 on, an architecture has instructions
# of its own (wgmma, TMA) that the plain target leaves out.
function(megacore_local_archs result)
  set(archs "")
  if(EXISTS /dev/nvidia0)
    set(archs "90a;100a")  # a GPU, of unknown architecture unless nvidia-smi names it
  endif()
  find_program(MEGACORE_NVIDIA_SMI nvidia-smi NO_CACHE)
  if(MEGACORE_NVIDIA_SMI)
    execute_process(
      COMMAND "${MEGACORE_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE status TIMEOUT 30)
    if(status EQUAL 0)
      set(archs "")
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
      foreach(capability IN LISTS capabilities)
        string(REPLACE "." "" arch "${capability}")
        if(arch GREATER_EQUAL 90)
          string(APPEND arch "a")
        endif()
        if(NOT arch LESS 80)
          list(APPEND archs "${arch}")
        endif()
      endforeach()
      list(REMOVE_DUPLICATES archs)
    endif()
  endif()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()

string(REGEX REPLACE "[, ]+" ";" MEGACORE_CUDA_ARCHS "${MEGACORE_CUDA_ARCHS}")
list(REMOVE_ITEM MEGACORE_CUDA_ARCHS "")
if(MEGACORE_CUDA_ARCHS STREQUAL "" AND DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(MEGACORE_CUDA_ARCHS "${CMAKE_CUDA_ARCHITECTURES}")
endif()
set(wanted "${MEGACORE_CUDA}")
if(wanted STREQUAL "AUTO")
  if(MEGACORE_CUDA_ARCHS STREQUAL "")
    megacore_local_archs(MEGACORE_CUDA_ARCHS)
    if(NOT MEGACORE_CUDA_ARCHS STREQUAL "")
      message(STATUS "CUDA kernels wanted for ${MEGACORE_CUDA_ARCHS}: the GPUs of this machine")
    endif()
  endif()
  if(MEGACORE_CUDA_ARCHS STREQUAL "")
    set(wanted "OFF")
    message(STATUS
      "CUDA kernels left out: no GPU of compute capability 8.0 or newer on this machine. MEGACORE_CUDA=ON "
      "pip install . builds them for sm_90a and sm_100a, MEGACORE_CUDA_ARCHS=90a for one architecture")
  endif()
endif()
if(NOT wanted STREQUAL "OFF")
  if(CMAKE_VERSION VERSION_LESS 3.26)
    message(FATAL_ERROR "CUDA kernels need CMake 3.26 or newer, got ${CMAKE_VERSION}; MEGACORE_CUDA=OFF builds without")
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(MEGACORE_HAS_NVCC yes)
  elseif(MEGACORE_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "MEGACORE_CUDA=ON, but no CUDA compiler works here. Put nvcc on PATH or set CUDACXX to it; "
      "or use MEGACORE_CUDA=AUTO (CUDA only where a GPU and nvcc are found) or OFF.")
  else()
    # Not a WARNING: CMake breaks its lines, and make shows the first one.
    message(NOTICE
      "CUDA kernels left out: a GPU or MEGACORE_CUDA_ARCHS asks for them, but no CUDA compiler works here. Put nvcc "
      "on PATH or set CUDACXX to it. MEGACORE_CUDA=OFF silences this, MEGACORE_CUDA=ON makes it an error.")
  endif()
endif()
