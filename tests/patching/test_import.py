"""What `import hf_effattn` brings and what it leaves alone."""

import subprocess
import sys
import textwrap

import pytest

import hf_effattn

PUBLIC = {"patch_attention", "unpatch_attention", "from_pretrained", "list_methods", "extend_positions"}


def run_fresh(code: str) -> str:
    """Run code in a new interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.slow
def test_import_registers_every_method_and_loads_nothing_heavy() -> None:
    """On top of what it registers with: no other model's code, no kernel compiler, no plotting, no data sets."""
    printed = run_fresh("""
        import sys
        from transformers import AttentionInterface, AttentionMaskInterface
        before = set(sys.modules)
        import hf_effattn
        new = set(sys.modules) - before
        heavy = {"triton", "matplotlib", "pandas", "datasets", "evaluate", "sklearn", "rich", "typer",
                 "sentence_transformers", "peft", "accelerate"}
        print(sorted(name for name in new if name.split(".")[0] in heavy or name.startswith("transformers.models.")
                     and ".modeling_" in name and ".auto." not in name))
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        names = hf_effattn.list_methods()
        print(all(name in ALL_ATTENTION_FUNCTIONS and name in ALL_MASK_ATTENTION_FUNCTIONS for name in names))
    """)
    assert printed.splitlines() == ["[]", "True"]


def test_public_names_have_docstrings() -> None:
    assert set(hf_effattn.__all__) >= PUBLIC
    for name in PUBLIC:
        docstring = getattr(hf_effattn, name).__doc__
        assert "Returns:" in docstring
        assert "Raises:" in docstring or name in ("unpatch_attention", "list_methods")
