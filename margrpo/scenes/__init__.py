"""The embedded compositional world: grammar, renderer and detector of 32x32 scenes.

Every prompt belongs to one of four categories, named as in T2I-CompBench where a counterpart exists:
`single`, `color`, `spatial`, `numeracy`. Of the eight T2I-CompBench categories a 32x32 canvas with objects of
seven pixels does not carry:

- `shape` as a category of its own: the shape is the noun here, so every prompt already tests it;
- `texture`: two tones inside seven pixels are below the sampling limit (12 px were needed in measurements);
- `3d_spatial`: telling front from back needs overlap, and half an object of seven pixels is not recognisable;
- `non_spatial`: containment, contact and linking lines need objects of several sizes or more room;
- `complex`: needs size words and textures, and its prompts are longer than this vocabulary.
"""
