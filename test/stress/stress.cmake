# Whole runs under attack.  Label "once": in the dev build only, the sanitizer builds leave them out.
find_package(Python3 COMPONENTS Interpreter REQUIRED)
add_test(NAME stress_sweep COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/test/stress/sweep.py $<TARGET_FILE_DIR:millrace>)
set_tests_properties(stress_sweep PROPERTIES TIMEOUT 900 SKIP_RETURN_CODE 77 RUN_SERIAL ON LABELS once)
add_test(NAME stress_chaos COMMAND Python3::Interpreter ${CMAKE_SOURCE_DIR}/test/stress/chaos.py $<TARGET_FILE_DIR:millrace> --seconds 120 --quiet)
set_tests_properties(stress_chaos PROPERTIES TIMEOUT 900 RUN_SERIAL ON LABELS once)
