"""Every explorable of the course: all of its corners, random states, handlers, time and memory."""

import ast
import base64

import pytest

import course_lib
from course_lib.teaching.explorables import EXPLORABLES
from tests.teaching.suite import check_handlers, check_memory, check_states, check_time

everyone = pytest.mark.parametrize("name", EXPLORABLES)


@pytest.fixture
def explorable(name):
    made = EXPLORABLES[name]()
    yield made
    made.close()


@everyone
def test_every_state_is_drawn_as_computed_quickly_and_leaves_nothing(
    explorable, name, record_property
):
    tour = check_states(explorable, EXPLORABLES[name])
    record_property("line", tour.line(explorable))
    check_time(explorable, tour)
    check_memory(explorable, tour)


@everyone
def test_every_handler_answers(explorable):
    check_handlers(explorable)


@everyone
def test_what_is_stored_is_a_picture_and_its_numbers(explorable, name):
    data, metadata = explorable._repr_mimebundle_()
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"].startswith(f"{explorable.name}: ")
    assert any(character.isdigit() for character in data["text/plain"])
    assert metadata["image/png"]["alt"] == explorable.alt != ""
    again = EXPLORABLES[name]()
    assert again._repr_mimebundle_()[0]["image/png"] == data["image/png"]
    assert again.summary == explorable.summary
    again.close()


@everyone
def test_the_state_is_one_line_of_code(explorable):
    code = explorable.canvas.picture["code"]
    assert "\n" not in code
    ast.parse(code)


@pytest.mark.parametrize("name", ["router", "shapes"])
def test_the_line_of_code_is_the_config_that_is_shown(explorable):
    made = eval(explorable.canvas.picture["code"], vars(course_lib).copy())
    assert made.n_experts == explorable.state["experts"]
    assert made.n_experts_active == explorable.state["top_k"]
