"""Execute the .py files beside this one into notebooks: `make notebooks`, or `python notebooks weights` for one."""

import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient

HERE = Path(__file__).parent

for source in sorted(HERE.glob("[a-z]*.py")):
    if sys.argv[1:] and source.stem not in sys.argv[1:]:
        continue
    notebook = jupytext.read(source)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": HERE}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":  # what goes to stderr is notes and progress of libraries
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata.pop("language_info", None)
    jupytext.write(notebook, source.with_suffix(".ipynb"))
    print(source.with_suffix(".ipynb").name)
