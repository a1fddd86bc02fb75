// Definitions that newer C++ runtimes export and older ones lack. With them the library asks for libstdc++ of GCC 8
// (GLIBCXX_3.4.25) and glibc 2.28 at most. cmake/glibc_stubs.py does the rest; tools/packaging/wheel.py asserts the result.
#include <sstream>

// GLIBCXX_3.4.26: the default constructors, which headers of libstdc++ declare as instantiated elsewhere.
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();

// GLIBC_2.32: the headers of libstdc++ ask it whether a reference count may be changed without an atomic instruction.
// 0 is right in any process.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
