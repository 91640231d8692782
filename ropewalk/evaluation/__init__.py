"""Evaluation: how good a trained model is, at lengths it was and was not trained on."""
