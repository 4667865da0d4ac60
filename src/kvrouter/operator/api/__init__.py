"""The API: DynamoGraphDeployment as models and as a definition, and Grove's topologies as they are read."""
