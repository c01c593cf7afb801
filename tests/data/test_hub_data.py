"""A data set that the Hub does not give: its name, why, and what to do instead."""

import pytest

from hf_effattn.data import glue_tasks, hub_data, labelled_texts, text_data, translation_data
from scripts.lra.load import load_lra
from scripts.train import qa

PAIRS = translation_data.DataArguments("no/such", source_lang="de", target_lang="en")
READERS = {
    "classification": (lambda: labelled_texts.load_texts(labelled_texts.DataArguments("no/such")), "--class_files"),
    "language model": (lambda: text_data.load_texts(text_data.DataArguments("no/such")), "--train_files"),
    "translation": (lambda: translation_data.load_pairs(PAIRS), "--train_source and --train_target"),
    "questions": (lambda: qa.load_questions(qa.DataArguments("no/such")), "--train_files"),
    "glue": (lambda: glue_tasks.load_glue("cola"), "--data_dir"),
    "image": (lambda: load_lra("image"), "--data_path"),
}


@pytest.mark.parametrize("reader", READERS)
def test_without_a_network(reader):
    read, instead = READERS[reader]
    message = rf"the data set '\S+/\w+' cannot be had from the Hub \(.*reach.*HF_HUB_OFFLINE.*, or name .*{instead}"
    with pytest.raises(FileNotFoundError, match=message):
        read()


def test_a_name_that_is_none():
    with pytest.raises(FileNotFoundError, match=r"'/no/such' cannot be had .* check its name .* files with --this$"):
        hub_data.load_from_hub("/no/such", instead="--this")
