# The target zerofp8_torch: LibTorch as it comes with PyPI's torch. Its CUDA build needs a CUDA toolkit for
# find_package(Torch), so the two CPU libraries are linked directly.
set(ZEROFP8_TORCH_DIR "" CACHE PATH "Folder of the installed Python package `torch`")
if(NOT ZEROFP8_TORCH_DIR)
  if(NOT Python_EXECUTABLE)
    find_package(Python COMPONENTS Interpreter REQUIRED)
  endif()
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE ZEROFP8_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS ${ZEROFP8_TORCH_DIR}/lib/libtorch_cpu.so)
  message(FATAL_ERROR "zerofp8 needs LibTorch here: pip install torch, then configure with "
                      "-DZEROFP8_TORCH_DIR=<site-packages>/torch (given: '${ZEROFP8_TORCH_DIR}')")
endif()

# PyPI's torch 2.6 is built with libstdc++'s old ABI, later ones with the new one. Everything that is linked with it follows;
# fmt, whose library has the new one, is taken from its headers then.
file(STRINGS ${ZEROFP8_TORCH_DIR}/lib/libc10.so _zerofp8_new_abi LIMIT_COUNT 1 REGEX "torchCheckFail.*__cxx11")
if(_zerofp8_new_abi)
  set(ZEROFP8_CXX11_ABI 1)
else()
  set(ZEROFP8_CXX11_ABI 0)
  add_compile_definitions(FMT_HEADER_ONLY)
endif()
add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=${ZEROFP8_CXX11_ABI})
message(STATUS "zerofp8: torch in ${ZEROFP8_TORCH_DIR}, C++11 ABI ${ZEROFP8_CXX11_ABI}")

if(NOT TARGET zerofp8_torch)
  add_library(zerofp8_torch INTERFACE)
  # After the system's folders: torch brings a copy of fmt of another version.
  target_compile_options(zerofp8_torch INTERFACE
    "SHELL:-idirafter ${ZEROFP8_TORCH_DIR}/include"
    "SHELL:-idirafter ${ZEROFP8_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(zerofp8_torch INTERFACE OMPI_SKIP_MPICXX)
  target_link_libraries(zerofp8_torch INTERFACE
    ${ZEROFP8_TORCH_DIR}/lib/libtorch_cpu.so ${ZEROFP8_TORCH_DIR}/lib/libc10.so)
endif()
