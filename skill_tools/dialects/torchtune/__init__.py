"""torchtune: one YAML a run, overrides on the command line, and a recipe that reads both.

- recipe: the program that `tune run` starts; it alone decides which keys are read
- family: what a recipe does (`full`, `lora`, `ppo`, `knowledge_distillation`, `inference`); the YAML's sections show it
- component: a section with `_component_`, the dotted name of what it builds; its other keys are arguments
"""

TORCHTUNE = "torchtune"
