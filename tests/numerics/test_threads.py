"""One thread at a time: the others wait, and say so."""

import threading
import warnings

import pytest
from threadpoolctl import threadpool_info

from numpyro_gpx.numerics import threads
from numpyro_gpx.numerics.threads import one_at_a_time


def blas_threads():
    return {x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"}


def test_blas_has_one_thread_inside_also_once_an_inner_block_has_ended():
    before = blas_threads()
    with one_at_a_time():
        with one_at_a_time():
            pass
        assert blas_threads() <= {1}
    assert blas_threads() == before


def enter_in_a_thread(entered):
    def enter():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with one_at_a_time():
                entered.append(len(caught))

    thread = threading.Thread(target=enter)
    thread.start()
    return thread


def test_another_thread_waits_and_says_so(monkeypatch):
    monkeypatch.setattr(threads, "_PATIENCE", 0.05)
    entered = []
    with one_at_a_time():
        thread = enter_in_a_thread(entered)
        thread.join(timeout=0.5)
        assert not entered
    thread.join(timeout=10.0)
    assert entered == [1]


def test_nobody_waits_for_a_free_door_nor_after_an_error():
    with pytest.raises(KeyError), one_at_a_time():
        raise KeyError
    entered = []
    enter_in_a_thread(entered).join(timeout=10.0)
    assert entered == [0]
