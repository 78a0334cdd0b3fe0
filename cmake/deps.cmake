# What zensync is built with: an installed package first, else a pinned source with its checksum.
#
#   ZENSYNC_DEPS=auto    installed packages first, what is missing from its pinned source (the default)
#   ZENSYNC_DEPS=system  installed packages only: nothing is fetched
#   ZENSYNC_DEPS=fetch   pinned sources only: the same build on every machine
#   ZENSYNC_DEPS_MIRROR  a folder with the archives (names below), used in place of the network;
#                        checksums are verified all the same
#
# Gives: zensync::hwy (target, with ZENSYNC_SIMD only), ZENSYNC_ASIO_INCLUDE, ZENSYNC_XXHASH_INCLUDE
# (header-only use), GTest::gtest and GTest::gtest_main (with ZENSYNC_TESTS only).
# ZENSYNC_HWY_SHARED is the shared library that zensync::hwy stands for, empty if it is static.
include(FetchContent)
if(POLICY CMP0135)
  cmake_policy(SET CMP0135 NEW)
endif()

set(ZENSYNC_DEPS "auto" CACHE STRING "Where libraries come from: auto, system or fetch")
set_property(CACHE ZENSYNC_DEPS PROPERTY STRINGS auto system fetch)
set(ZENSYNC_DEPS_MIRROR "" CACHE PATH "Folder with the archives of the pinned sources")
if(NOT ZENSYNC_DEPS MATCHES "^(auto|system|fetch)$")
  message(FATAL_ERROR "ZENSYNC_DEPS is '${ZENSYNC_DEPS}'; it must be auto, system or fetch")
endif()

# name | archive's name in a mirror | address | SHA-256
set(ZENSYNC_PIN_highway
  highway-1.2.0.tar.gz
  https://github.com/google/highway/archive/refs/tags/1.2.0.tar.gz
  7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
set(ZENSYNC_PIN_asio
  asio-1.30.2.tar.gz
  https://github.com/chriskohlhoff/asio/archive/refs/tags/asio-1-30-2.tar.gz
  755bd7f85a4b269c67ae0ea254907c078d408cce8e1a352ad2ed664d233780e8)
set(ZENSYNC_PIN_xxhash
  xxhash-0.8.3.tar.gz
  https://github.com/Cyan4973/xxHash/archive/refs/tags/v0.8.3.tar.gz
  aae608dfe8213dfd05d909a57718ef82f30722c392344583d3f39050c7f29a80)
set(ZENSYNC_PIN_googletest
  googletest-1.12.1.tar.gz
  https://github.com/google/googletest/archive/refs/tags/release-1.12.1.tar.gz
  81964fe578e9bd7c94dfdb09c8e4d6e6759e19967e397dbea48d1c10e45d0df2)

# Unpacks the pinned source of `name` and sets <name>_SOURCE_DIR. With BUILD its own CMake project
# is added too; without, only the files are there.
function(zensync_fetch name)
  cmake_parse_arguments(F "BUILD" "" "" ${ARGN})
  if(ZENSYNC_DEPS STREQUAL "system")
    message(FATAL_ERROR "${name} is not installed and ZENSYNC_DEPS=system fetches nothing")
  endif()
  list(GET ZENSYNC_PIN_${name} 0 archive)
  list(GET ZENSYNC_PIN_${name} 1 url)
  list(GET ZENSYNC_PIN_${name} 2 sha256)
  if(ZENSYNC_DEPS_MIRROR)
    set(url "${ZENSYNC_DEPS_MIRROR}/${archive}")
    if(NOT EXISTS "${url}")
      message(FATAL_ERROR "ZENSYNC_DEPS_MIRROR has no ${archive}")
    endif()
  endif()
  message(STATUS "zensync: ${name} from its pinned source, ${url}")
  set(subdir "")
  if(NOT F_BUILD)
    set(subdir SOURCE_SUBDIR zensync-adds-no-project)  # a folder that is not there
  endif()
  FetchContent_Declare(${name} URL "${url}" URL_HASH SHA256=${sha256} ${subdir})
  FetchContent_MakeAvailable(${name})
  set(${name}_SOURCE_DIR "${${name}_SOURCE_DIR}" PARENT_SCOPE)
endfunction()

# A folder that holds `header`: an installed one, else `subfolder` of the pinned source of `name`.
function(zensync_header_only variable name header subfolder)
  if(NOT ZENSYNC_DEPS STREQUAL "fetch")
    find_path(${variable} ${header})
  endif()
  if(NOT ${variable})
    zensync_fetch(${name})
    set(${variable} "${${name}_SOURCE_DIR}/${subfolder}" CACHE PATH "Folder of ${header}" FORCE)
  endif()
endfunction()

# Highway's run-time part, as a static library of the few files that its dispatch needs.
function(zensync_hwy_from_source)
  zensync_fetch(highway)
  set(sources "")
  foreach(file abort aligned_allocator per_target print targets)
    list(APPEND sources "${highway_SOURCE_DIR}/hwy/${file}.cc")
  endforeach()
  add_library(zensync_hwy STATIC ${sources})
  target_include_directories(zensync_hwy SYSTEM PUBLIC "${highway_SOURCE_DIR}")
  target_compile_definitions(zensync_hwy PUBLIC HWY_STATIC_DEFINE)
endfunction()

function(zensync_find_hwy)
  if(NOT ZENSYNC_DEPS STREQUAL "fetch")
    find_path(ZENSYNC_HWY_INCLUDE hwy/highway.h)
    find_library(ZENSYNC_HWY_LIBRARY hwy)
  endif()
  set(ZENSYNC_HWY_SHARED "" PARENT_SCOPE)
  if(ZENSYNC_HWY_INCLUDE AND ZENSYNC_HWY_LIBRARY)
    add_library(zensync_hwy INTERFACE)
    target_include_directories(zensync_hwy SYSTEM INTERFACE "${ZENSYNC_HWY_INCLUDE}")
    target_link_libraries(zensync_hwy INTERFACE "${ZENSYNC_HWY_LIBRARY}")
    if(ZENSYNC_HWY_LIBRARY MATCHES "\\.so")
      target_compile_definitions(zensync_hwy INTERFACE HWY_SHARED_DEFINE)
      set(ZENSYNC_HWY_SHARED "${ZENSYNC_HWY_LIBRARY}" PARENT_SCOPE)
    endif()
  else()
    zensync_hwy_from_source()
  endif()
  add_library(zensync::hwy ALIAS zensync_hwy)
endfunction()

find_package(Threads REQUIRED)
zensync_header_only(ZENSYNC_ASIO_INCLUDE asio asio.hpp asio/include)
zensync_header_only(ZENSYNC_XXHASH_INCLUDE xxhash xxhash.h .)
set(ZENSYNC_HWY_SHARED "")
if(ZENSYNC_SIMD)
  zensync_find_hwy()
endif()
if(ZENSYNC_TESTS)
  if(NOT ZENSYNC_DEPS STREQUAL "fetch")
    find_package(GTest QUIET)
  endif()
  if(NOT TARGET GTest::gtest_main)
    set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
    set(INSTALL_GTEST OFF CACHE BOOL "" FORCE)
    zensync_fetch(googletest BUILD)
  endif()
  include(GoogleTest)
endif()
