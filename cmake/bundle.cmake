# Puts a shared library beside the Python extension, so that a built wheel imports on a machine that
# does not have it. Only Highway's run-time part can be one, and only where the system ships no static
# build of it (Debian does not); from its pinned source it is static and nothing is bundled.
#
#   zensync_bundle(TARGET LIBRARY DESTINATION)
#
# The file is installed under its SONAME, which is the name that the extension asks for, and the
# extension looks in its own folder first.
function(zensync_bundle target library destination)
  if(NOT UNIX OR APPLE)
    message(FATAL_ERROR "zensync_bundle knows ELF only; build with ZENSYNC_DEPS=fetch")
  endif()
  execute_process(COMMAND ${CMAKE_READELF} -d "${library}" OUTPUT_VARIABLE dynamic
    RESULT_VARIABLE failed)
  if(failed OR NOT dynamic MATCHES "\\(SONAME\\)[^[]*\\[([^]]+)\\]")
    message(FATAL_ERROR "no SONAME found in ${library}")
  endif()
  set(soname "${CMAKE_MATCH_1}")
  file(REAL_PATH "${library}" real)
  set_property(TARGET ${target} PROPERTY INSTALL_RPATH "$ORIGIN")
  install(FILES "${real}" DESTINATION ${destination} RENAME "${soname}")
endfunction()
