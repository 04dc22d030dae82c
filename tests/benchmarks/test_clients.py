"""The table of `make clients`, and its tasks for lm-eval."""

import yaml

from benchmarks.clients.__main__ import CHOICE, DATA, EXPECTED, GENERATE, SUITES, CaseResult, table


def test_a_client_has_one_row_that_tells_expected_failures_from_others() -> None:
    found = [CaseResult("a", "chat", ""), CaseResult("a", "image", "400", expected=True), CaseResult("b", "chat", "no")]
    assert table(found).splitlines()[2:] == [
        "| a | 1 of 2 | chat | image (expected) |",
        "| b | 0 of 1 |  | chat |",
    ]


def test_of_many_cases_a_row_names_those_that_failed() -> None:
    found = [CaseResult("a", str(index), "" if index else "no") for index in range(20)]
    assert table(found).splitlines()[2] == "| a | 19 of 20 | - | 0 |"


def test_tasks_for_lm_eval_read_the_local_file() -> None:
    for task in (CHOICE, GENERATE):
        read = yaml.safe_load(task + DATA.format(path="/data.json"))
        assert read["dataset_kwargs"] == {"data_files": {"test": "/data.json"}}
        assert read["doc_to_target"] == "capital" and read["metric_list"]


def test_each_suite_names_what_cannot_pass() -> None:
    assert set(EXPECTED) == set(SUITES) and all("image" in " ".join(each) for each in EXPECTED.values())
