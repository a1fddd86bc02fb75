# older_glibc: what to link instead of libdl, librt and libpthread, so that the library loads on glibc 2.28, as torch does.
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/glibc_stubs.py" --compiler "${CMAKE_CXX_COMPILER}"
          --newest 2.28 --output "${CMAKE_CURRENT_BINARY_DIR}/older_glibc"
  OUTPUT_VARIABLE stubs OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" stubs "${stubs}")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/glibc_stubs.py)
add_library(older_glibc INTERFACE)
target_link_libraries(older_glibc INTERFACE ${stubs} dl rt pthread)
