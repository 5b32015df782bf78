"""Tests of lastbit.integrations.aws_lambda, with Powertools and messages of moto's SQS."""
