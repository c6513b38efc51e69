# find_package(NCCL): the target NCCL::NCCL. Looked for where NCCL_HOME or NCCL_ROOT say, in the CUDA toolkit, in the system,
# and among Python's packages (pip install nvidia-nccl-cu13), which have libnccl.so.2 only.
set(zerofp8_nccl_hints ${NCCL_HOME} ${NCCL_ROOT} $ENV{NCCL_HOME} $ENV{NCCL_ROOT} ${CUDAToolkit_LIBRARY_ROOT} /usr/local/cuda)
find_package(Python3 QUIET COMPONENTS Interpreter)
if(Python3_Interpreter_FOUND)
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_paths()['purelib'])"
                  OUTPUT_VARIABLE zerofp8_site_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND zerofp8_nccl_hints ${zerofp8_site_packages}/nvidia/nccl)
endif()
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${zerofp8_nccl_hints} PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${zerofp8_nccl_hints} PATH_SUFFIXES lib lib64)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "install libnccl-dev, or set NCCL_HOME to where include/nccl.h and lib/libnccl.so are")
if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  # Linked into every program that uses zerofp8, in whichever directory that is.
  add_library(NCCL::NCCL SHARED IMPORTED GLOBAL)
  set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
