# The writing of checkpoints: unit tests that stand in for the system's calls, and whole runs.
target_link_options(test_data_write PRIVATE -Wl,--wrap=io_uring_queue_init,--wrap=io_uring_submit,--wrap=pwrite,--wrap=fsync,--wrap=malloc)
target_link_options(test_data_init PRIVATE -Wl,--wrap=sched_getaffinity,--wrap=pthread_create)
foreach(case epoch full no_uring)
  add_test(NAME e2e_checkpoints_${case} COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/e2e_checkpoints.py ${e2e_bin} ${case}
           $<TARGET_FILE:millrace-actor-fake>)
  set_tests_properties(e2e_checkpoints_${case} PROPERTIES TIMEOUT 600 RUN_SERIAL ON SKIP_RETURN_CODE 77 LABELS e2e)
endforeach()
set_tests_properties(e2e_checkpoints_no_uring PROPERTIES LABELS "e2e;once")     # preloads a library, which the address sanitizer refuses
