# find_package(zerofp8) for C++ users: installed targets, version and config files.
include(CMakePackageConfigHelpers)
set(zerofp8_targets zerofp8 zerofp8_optim zerofp8_comm zerofp8_config zerofp8_partition zerofp8_kernels)
install(TARGETS ${zerofp8_targets} EXPORT zerofp8Targets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(ZEROFP8_BUILD_CLI AND TARGET zerofp8_cli)
  install(TARGETS zerofp8_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
set(zerofp8_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/zerofp8)
install(EXPORT zerofp8Targets NAMESPACE zerofp8:: DESTINATION ${zerofp8_package_dir})
configure_package_config_file(cmake/zerofp8Config.cmake.in zerofp8Config.cmake
                              INSTALL_DESTINATION ${zerofp8_package_dir})
write_basic_package_version_file(zerofp8ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/zerofp8Config.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/zerofp8ConfigVersion.cmake DESTINATION ${zerofp8_package_dir})
if(ZEROFP8_WITH_NCCL)
  install(FILES cmake/FindNCCL.cmake DESTINATION ${zerofp8_package_dir})
endif()
