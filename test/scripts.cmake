# Tests that run whole programs.  Each is a ctest of its own, so that one that fails names its case.  Serial: `millrace clean` in one would
# remove what another has killed on purpose.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
set(e2e_bin $<TARGET_FILE_DIR:millrace>)
foreach(case usage check links complete complete_epoll deterministic demo kill supervisor_kill disk_full ledger_removed resume_ahead clean_spares_the_living garbage stop sigterm_at_start restart
        descriptors failing_actor no_room_for_checkpoints backoff target_bytes data_bytes hang pause two_runs fault_points metrics)
  add_test(NAME e2e_${case} COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/e2e_runtime.py ${e2e_bin} ${case})
  set_tests_properties(e2e_${case} PROPERTIES TIMEOUT 600 RUN_SERIAL ON SKIP_RETURN_CODE 77 LABELS e2e)
endforeach()
