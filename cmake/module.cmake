# One target per module of docs/architecture.md. A module sees the headers of the modules that it names,
# and of those that they name in turn (DEPS are PUBLIC), so an include against the order of levels does not
# compile. That a module includes only what it names itself is checked by tests/tidy.
#   zensync_module(NAME [SOURCES ...] [DEPS modules...] [LIBS targets...])
#   zensync_test(NAME SOURCES ... [DEPS modules...])   a GoogleTest program, one per module
function(zensync_flags target)
  # No contraction, no reassociation: bits are part of what zensync promises.
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -ffp-contract=off)
  if(ZENSYNC_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()

function(zensync_module name)
  cmake_parse_arguments(M "" "" "SOURCES;DEPS;LIBS" ${ARGN})
  add_library(zensync_${name} STATIC ${M_SOURCES})
  add_library(zensync::${name} ALIAS zensync_${name})
  target_include_directories(zensync_${name} PUBLIC
    $<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>
    PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/src)
  foreach(dep IN LISTS M_DEPS)
    target_link_libraries(zensync_${name} PUBLIC zensync_${dep})
  endforeach()
  target_link_libraries(zensync_${name} PRIVATE ${M_LIBS})
  zensync_flags(zensync_${name})
endfunction()

function(zensync_test name)
  if(NOT ZENSYNC_TESTS)
    return()
  endif()
  cmake_parse_arguments(T "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(test_${name} ${T_SOURCES})
  target_include_directories(test_${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests/support
    ${CMAKE_CURRENT_SOURCE_DIR}/src)
  foreach(dep IN LISTS T_DEPS)
    target_link_libraries(test_${name} PRIVATE zensync_${dep})
  endforeach()
  target_link_libraries(test_${name} PRIVATE GTest::gtest GTest::gtest_main Threads::Threads)
  zensync_flags(test_${name})
  gtest_discover_tests(test_${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()
