# The protocol models: small bounds and all mutants as a test, the large bounds as a target (minutes to hours, up to 4 GB).
add_test(NAME model_small COMMAND ${CMAKE_CURRENT_LIST_DIR}/run.sh --small)
set_tests_properties(model_small PROPERTIES TIMEOUT 1800 SKIP_RETURN_CODE 77 LABELS once)
add_custom_target(models-large COMMAND ${CMAKE_CURRENT_LIST_DIR}/run.sh --large USES_TERMINAL VERBATIM)
