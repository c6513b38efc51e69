zerofp8_test(comm_thread_test zerofp8_comm)
zerofp8_test(comm_fault_test zerofp8_comm)
zerofp8_test(comm_mismatch_test zerofp8_comm)
zerofp8_test(launch_env_test zerofp8_comm)
zerofp8_test(two_level_test zerofp8_comm)
if(ZEROFP8_WITH_NCCL)
  # The communicator's own files beside stand-ins for the CUDA runtime and NCCL, which take the place of the libraries
  # when it is linked: no GPU is needed.
  zerofp8_test(nccl_test zerofp8_comm)
  foreach(file IN ITEMS api collectives communicator link start watchdog)
    target_sources(nccl_test PRIVATE ${PROJECT_SOURCE_DIR}/src/comm/nccl_${file}.cc)
  endforeach()
  target_sources(nccl_test PRIVATE nccl_capture_test.cc nccl_fault_test.cc fake_cuda.cc fake_nccl.cc)
  target_link_libraries(nccl_test PRIVATE NCCL::NCCL CUDA::cudart_static)
endif()

# How MPI tests are started: also as root and with more ranks than cores, as in containers. mpirun ends its
# ranks by itself before CTest would end mpirun alone.
set(zerofp8_mpi_timeout 240)
math(EXPR zerofp8_mpi_ctest_timeout "${zerofp8_mpi_timeout} + 30")
set(zerofp8_mpi_environment
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  # Open MPI has no frame pointers: the fast unwinder would end in its first frame.
  ASAN_OPTIONS=fast_unwind_on_malloc=0
  LSAN_OPTIONS=suppressions=${CMAKE_CURRENT_SOURCE_DIR}/lsan.supp:print_suppressions=0)

# ThreadSanitizer cannot see into an MPI library that was built without it and reports its locks as races;
# the code above the transport is the one that thread ranks run.
if(ZEROFP8_WITH_MPI AND NOT "thread" IN_LIST ZEROFP8_SANITIZE)
  set(zerofp8_mpi_tests ON)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI REQUIRED COMPONENTS CXX)  # for MPIEXEC_EXECUTABLE, which is known per directory
else()
  set(zerofp8_mpi_tests OFF)
endif()

# zerofp8_mpirun(TEST PROGRAM RANKS ARGS...): registers `mpirun -n RANKS PROGRAM ARGS` as a test.
function(zerofp8_mpirun test program ranks)
  add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} --oversubscribe
                                --timeout ${zerofp8_mpi_timeout} $<TARGET_FILE:${program}> ${ARGN})
  set_tests_properties(${test} PROPERTIES TIMEOUT ${zerofp8_mpi_ctest_timeout} PROCESSORS ${ranks}
    ENVIRONMENT "${zerofp8_mpi_environment};ZEROFP8_TEST_RANKS=${ranks}")
endfunction()

# zerofp8_mpi_test(NAME LIBRARIES... [RANKS 2 3]): builds NAME.cc with mpi_main.cc, which provides main() and
# the communicator world() of mpi_world.h, and runs it under mpirun with 2 and with 3 ranks or as RANKS says.
# Nothing happens where zerofp8 is built without MPI.
function(zerofp8_mpi_test name)
  if(NOT zerofp8_mpi_tests)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "RANKS")
  if(NOT arg_RANKS)
    set(arg_RANKS 2 3)
  endif()
  add_executable(${name} ${name}.cc mpi_main.cc mpi_keep_plugins.cc)
  target_link_libraries(${name} PRIVATE ${arg_UNPARSED_ARGUMENTS} zerofp8_comm GTest::gtest fmt::fmt)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  zerofp8_warnings(${name})
  foreach(ranks IN LISTS arg_RANKS)
    zerofp8_mpirun(${name}_on_${ranks} ${name} ${ranks})
  endforeach()
endfunction()

zerofp8_mpi_test(comm_mpi_test)
if(zerofp8_mpi_tests)
  add_executable(comm_mpi_user_test comm_mpi_user_test.cc mpi_keep_plugins.cc)
  target_link_libraries(comm_mpi_user_test PRIVATE zerofp8_comm MPI::MPI_CXX GTest::gtest fmt::fmt)
  target_include_directories(comm_mpi_user_test PRIVATE ${PROJECT_SOURCE_DIR})
  zerofp8_warnings(comm_mpi_user_test)
  zerofp8_mpirun(comm_mpi_user_test_on_2 comm_mpi_user_test 2)
  zerofp8_mpirun(comm_mpi_user_test_single comm_mpi_user_test 1 --single)
endif()
