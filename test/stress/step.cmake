# Programs that single-step the ipc functions (x86-64).  They link the sources without fault points: the instructions of production.
if(MR_SANITIZE STREQUAL "none" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  file(GLOB plain_src CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/ipc/*.c ${CMAKE_SOURCE_DIR}/base/*.c)
  add_library(mr_ipc_plain STATIC ${plain_src})
  target_compile_options(mr_ipc_plain PUBLIC -UMR_FAULT_POINTS -O2)
  target_link_libraries(mr_ipc_plain PUBLIC Threads::Threads PkgConfig::CMOCKA)

  foreach(name step_kill step_wait)
    add_executable(${name} stress/${name}.c)
    target_link_libraries(${name} PRIVATE mr_ipc_plain)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77)
  endforeach()
  # Every position with a real SIGKILL, whole turns, and recovery broken on purpose: `ctest -C full -L full` (some 15 minutes).
  add_test(NAME step_kill_full CONFIGURATIONS full COMMAND step_kill --full)
  add_test(NAME step_kill_broken CONFIGURATIONS full COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/stress/step_broken.sh ${CMAKE_C_COMPILER})
  set_tests_properties(step_kill_full step_kill_broken PROPERTIES TIMEOUT 3600 LABELS full)
endif()
